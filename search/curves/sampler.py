"""A sampler that learns from every epoch of every trial, whether it ended, runs or waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.curves.earlier import EARLIER, Earlier
from hpsearch.search.curves.forecast import CHOSEN, band
from hpsearch.search.curves.learning import (
    FITTED,
    Lesson,
    believing,
    parameters,
    posterior_of,
    silent_rows,
    told_trials,
)
from hpsearch.search.curves.multi_objective import Several
from hpsearch.search.curves.process import Points, log_expected_improvement
from hpsearch.search.curves.space import TOPS, best_candidate


class CurvesSampler(BaseSampler):
    """Suggests where a trial's value after its last epoch is expected to improve most on the best that is foreseen.

    Of several metrics: where it is expected to add most to the hypervolume that the front dominates (`several`).

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
        if len(study.directions) > 1:
            return Several(self._epochs, self._random).suggested(study, trial, search_space)
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
        silent = silent_rows(study, space, but=trial.number)
        posterior = believing(posterior, space, space.rows[running], np.array(running, dtype=np.int64), silent)

        def judged(rows: np.ndarray) -> np.ndarray:
            at = Points.at_the_end(space.features(rows))
            return log_expected_improvement(*posterior.at(at), incumbent).numpy()

        best = np.argsort(foreseen, kind="stable")[:TOPS]
        had = np.concatenate([space.rows, silent])
        row, top = best_candidate(judged, space, self._random, around=lesson.rows[best], had=had)
        given = any(not d.single() for d in trial.distributions.values())  # by an earlier attempt, or somebody
        if not given and "fixed_params" not in trial.system_attrs and np.isfinite(points.loss).any():
            mean, deviation = posterior.at(Points.at_the_end(space.features(row[None])))
            middle, low, high = band(points, mean.item(), deviation.item(), maximize=maximize)
            then, _, _ = band(points, incumbent, 0.0, maximize=maximize)
            near = self._near(told, None if top is None else int(best[top]))
            note: Any = {"foreseen": middle, "band": [low, high], "best": then, **near}
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
