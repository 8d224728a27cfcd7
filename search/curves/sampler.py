"""A sampler that learns from every epoch of every trial, whether it ended, runs or waits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import optuna
import torch
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from search.curves.earlier import EARLIER, Earlier
from search.curves.foreseen import CHOSEN, band
from search.curves.learning import Lesson, known, parameters
from search.curves.process import Points, Posterior, Process, log_expected_improvement
from search.curves.space import Space

FITTED = "curves:process"  # the study's system attribute with the hyperparameters that were fitted last
REFIT = 1.15  # times the trials of the last fit, from which on they are old

DRAWN = 800  # configurations at random among which the best is sought
AROUND = 60  # configurations around each of the
TOPS = 5  # best trials, and of those at random

_STATES = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)


class CurvesSampler(BaseSampler):
    """Suggests where a trial's value after its last epoch is expected to improve most on the best that is foreseen.

    Stateless: what it needs is in the study, the process's hyperparameters too, which are fitted again by whoever
    finds them old. The same study and the same seed give the same suggestion in any process.

    Args:
        seed: of this suggestion.
        epochs: of a full trial.
        n_startup_trials: drawn at random before any is chosen; trials of earlier studies count.
        random_fraction: of the later ones that are drawn at random all the same.
    """

    def __init__(self, *, seed: int, epochs: int, n_startup_trials: int = 10, random_fraction: float = 0.3) -> None:
        self._random = np.random.default_rng(seed)
        self._independent = RandomSampler(seed)
        self._epochs = epochs
        self._n_startup_trials = n_startup_trials
        self._at_random = self._random.random() < random_fraction

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All parameters that trials had; none before there are enough trials, or where it is to be at random."""
        trials = told_trials(study, but=trial.number)
        self._kept = study._storage.get_study_system_attrs(study._study_id)
        self._earlier = Earlier.read(self._kept.get(EARLIER))
        if self._at_random or len(trials) + len(self._earlier.trials) < self._n_startup_trials:
            return {}
        return parameters(trials, self._earlier)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The configuration; parameters that it turns out not to have are not asked for."""
        if not search_space:
            return {}
        told, maximize = told_trials(study, but=trial.number), study.direction == StudyDirection.MAXIMIZE
        lesson = Lesson.of(
            told, search_space, maximize=maximize, epochs=self._epochs, random=self._random, earlier=self._earlier
        )
        space, points = lesson.space, lesson.seen
        began = self._n_startup_trials if self._earlier.trials else 0
        posterior = posterior_of(study, self._kept.get(FITTED, {}), lesson, began + len(told))
        foreseen = posterior.at(lesson.ends)[0].numpy()
        incumbent = float(foreseen[: len(told)].min() if told else foreseen.min())
        running = [i for i, t in enumerate(told) if t.state == TrialState.RUNNING]
        silent = np.array([space.row(t.params) for t in _running(study, trial) if not t.intermediate_values])
        posterior = _believing(posterior, space, running, silent.reshape(-1, len(space.names)))
        had = np.concatenate([space.rows, silent.reshape(-1, len(space.names))])
        row, top = self._best(posterior, space, lesson.rows, foreseen, incumbent, had)
        given = any(not d.single() for d in trial.distributions.values())  # by an earlier attempt, or somebody
        if not given and "fixed_params" not in trial.system_attrs and np.isfinite(points.loss).any():
            mean, deviation = posterior.at(Points.at_the_end(space.features(row[None])))
            middle, low, high = band(points, mean.item(), deviation.item(), maximize=maximize)
            best, _, _ = band(points, incumbent, 0.0, maximize=maximize)
            note: Any = {"foreseen": middle, "band": [low, high], "best": best, **self._near(told, top)}
            study._storage.set_trial_system_attr(trial._trial_id, CHOSEN, note)
        return space.params(row)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """A parameter at random: at the start, or one that no trial had."""
        return self._independent.sample_independent(study, trial, param_name, param_distribution)

    def _near(self, told: list[FrozenTrial], top: int | None) -> dict[str, Any]:
        """Which trial a configuration was found near, and of which study where that is an earlier one."""
        if top is None or top < len(told):
            return {"near": None if top is None else told[top].number}
        there = self._earlier.trials[top - len(told)]
        return {"near": there.number, "of": self._earlier.studies[there.study - 1]}

    def _best(
        self,
        posterior: Posterior,
        space: Space,
        rows: np.ndarray,
        foreseen: np.ndarray,
        incumbent: float,
        had: np.ndarray,
    ) -> tuple[np.ndarray, int | None]:
        """The row of the largest expected improvement among some at random and around the best of `rows`.

        None that a trial `had`, while there are others: where hardly anything is to be gained, the same corner of the
        space would be tried over and over.

        Returns:
            The row, and the index of that which it was sought around; None where it came of one at random.
        """

        def judged(rows: np.ndarray) -> np.ndarray:
            at = Points.at_the_end(space.features(rows))
            return log_expected_improvement(*posterior.at(at), incumbent).numpy()

        drawn = space.drawn(self._random, DRAWN)
        gains = judged(drawn)
        best = np.argsort(foreseen, kind="stable")[:TOPS]
        tops = np.concatenate([rows[best], drawn[np.argsort(-gains, kind="stable")[:TOPS]]])
        around = space.near(self._random, tops, AROUND)
        tried, gains = np.concatenate([drawn, around]), np.concatenate([gains, judged(around)])
        chosen = int(np.argmax(np.where(_among(tried, had), -np.inf, gains)))
        top = (chosen - DRAWN) // AROUND  # below 0 for those at random
        return tried[chosen], int(best[top]) if 0 <= top < len(best) else None


def _among(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Which rows [n, parameters] are among others, but for the rounding of a value to a number and back."""
    known = {row.tobytes() for row in np.round(others, 9) + 0.0}
    return np.array([row.tobytes() in known for row in np.round(rows, 9) + 0.0], dtype=bool)


def told_trials(study: optuna.Study, *, but: int | None = None) -> list[FrozenTrial]:
    """The trials that have reported something, or ended before they could."""
    trials = study._get_trials(deepcopy=False, states=_STATES, use_cache=True)
    return [t for t in known(trials) if t.number != but]


def _running(study: optuna.Study, trial: FrozenTrial) -> list[FrozenTrial]:
    trials = study._get_trials(deepcopy=False, states=(TrialState.RUNNING,), use_cache=True)
    return [t for t in trials if t.params and t.number != trial.number]


def posterior_of(study: optuna.Study, kept: Mapping[str, Any], lesson: Lesson, trials: int) -> Posterior:
    """What the points show, by hyperparameters of the study's; fitted here when those are old."""
    names, process = lesson.space.names, lesson.new_process
    if kept.get("names") == names and len(kept["theta"]) == len(process.theta):
        process = Process(process.owner, torch.tensor(kept["theta"], dtype=torch.float64))
    else:
        kept = {}
    if trials >= REFIT * kept.get("trials", 0):
        process = lesson.fitted(process)
        fitted: Any = {"names": names, "trials": trials, "theta": process.theta.tolist()}
        study._storage.set_study_system_attr(study._study_id, FITTED, fitted)
    return process.given(lesson.points, lesson.scores)


def _believing(posterior: Posterior, space: Space, running: list[int], silent: np.ndarray) -> Posterior:
    """As if trials that run had ended as is foreseen: those of some rows of the space's, and others."""
    if not running and not len(silent):
        return posterior
    rows = np.concatenate([space.rows[running], silent])
    numbers = [*running, *range(-2, -2 - len(silent), -1)]
    return posterior.believing(Points.at_the_end(space.features(rows), numbers))
