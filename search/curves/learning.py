"""Fit the hyperparameters of the learning-curve model."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
import torch
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState
from torch import Tensor

from hpsearch.search.curves.earlier import Earlier
from hpsearch.search.curves.points import MOST, OF_EACH, Seen, losses, seen
from hpsearch.search.curves.process import Points, Posterior, Process
from hpsearch.search.curves.space import Space

FIT = 200  # points that hyperparameters are fitted on, at most


def known(trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
    """The trials that have reported something, or ended before they could."""
    return [t for t in trials if t.params and (t.intermediate_values or t.state.is_finished())]


def parameters(trials: Iterable[FrozenTrial], earlier: Earlier | None = None) -> dict[str, BaseDistribution]:
    """All parameters of trials, as the last had it, and of earlier studies; those of one value alone are none."""
    found = {} if earlier is None else {name: d for name, d in earlier.distributions.items() if not d.single()}
    return found | {name: d for trial in trials for name, d in trial.distributions.items() if not d.single()}


@dataclass(frozen=True)
class Lesson:
    """What a process learns from: points of a space, and their scores.

    Attributes:
        space: of the trials' parameters; a row for each trial.
        seen: the points of the trials, by index of the trial.
        rows: of the trials, then of those of earlier studies [trials, parameters].
        points: of the trials, then of those of earlier studies, with the features of their configurations.
        scores: of the points [n].
        steady: whether they are taken for those of configurations, whatever the trial and the epoch.
    """

    space: Space
    seen: Seen
    rows: np.ndarray
    points: Points
    scores: Tensor
    steady: bool = False

    @classmethod
    def of(  # noqa: PLR0913 what a lesson depends on
        cls,
        trials: Sequence[FrozenTrial],
        distributions: dict[str, BaseDistribution],
        *,
        maximize: bool,
        epochs: int,
        random: np.random.Generator,
        of_each: int = OF_EACH,
        always: Container[int] = (),
        earlier: Earlier | None = None,
        curves: Sequence[Mapping[int, float]] | None = None,
        steady: bool = False,
    ) -> Lesson:
        """Of trials that are `known`.

        Args:
            trials: of the study.
            distributions: of the parameters that matter, see `parameters`; some.
            maximize: whether higher values are better.
            epochs: of a full trial.
            random: chooses where there are too many points.
            of_each, always: see `seen`.
            earlier: trials of earlier studies.
            curves: of each trial, the losses by epoch, from 1, that are learnt as they are; None for those that the
                trials have reported, of which the best so far counts.
            steady: whether they are points at the last epoch that depend on the configuration alone.
        """
        earlier = earlier or Earlier()
        space = Space(distributions, [t.params for t in trials], earlier.drawn)
        so_far = curves is None
        curves = [losses(t, maximize=maximize, epochs=epochs) for t in trials] if curves is None else curves
        found = seen(curves, epochs, random, of_each=of_each, always=always, so_far=so_far)
        theirs = np.array([space.row(t.params) for t in earlier.trials]).reshape(-1, len(space.names))
        rows = np.concatenate([space.rows, theirs])
        # Of earlier studies those of the most telling trials, as many as there is room for.
        others = [(i, s, score, t.study) for i, t in enumerate(earlier.trials, len(trials)) for s, score in t.points]
        others = others[: MOST - len(found.s)]
        trial, s, their_scores, study = np.array(others, dtype=np.float64).reshape(len(others), 4).T
        trial = np.concatenate([found.trial, trial.astype(np.int64)])
        study = np.concatenate([np.zeros_like(found.trial), study.astype(np.int64)])
        columns = (space.features(rows)[trial], np.concatenate([found.s, s]), trial, study)
        scores = torch.from_numpy(np.concatenate([found.scores, their_scores]))
        return cls(space, found, rows, Points(*map(torch.from_numpy, columns)), scores, steady)

    @property
    def ends(self) -> Points:
        """The trials after their last epoch; those of earlier studies as if they were run in this one."""
        own = len(self.space.rows)
        numbers = np.concatenate([np.arange(own), np.full(len(self.rows) - own, -1)])
        return Points.at_the_end(self.space.features(self.rows), numbers)

    @property
    def new_process(self) -> Process:
        """What is expected before anything is seen."""
        return Process.new(self.space.owner, several=bool(self.points.study.any()), steady=self.steady)

    def fitted(self, process: Process) -> Process:
        """A process fitted to some of the points, sought from its hyperparameters on."""
        part = _part(len(self.seen.s), len(self.scores))
        return process.fitted(self.points.some(part), self.scores[part])


def _part(own: int, every: int) -> Tensor:
    """The points that are fitted on: own ones, but for a quarter where earlier studies have as many."""
    first = min(own, FIT - min(FIT // 4, every - own))
    second = min(every - own, FIT - first)
    spread = [np.linspace(0, own - 1, first, dtype=np.int64), np.linspace(own, every - 1, second, dtype=np.int64)]
    return torch.from_numpy(np.concatenate(spread))


FITTED = "curves:process"  # the study's system attribute with the hyperparameters that were fitted last
REFIT = 1.15  # times the trials of the last fit, from which on they are old

_STATES = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)


def told_trials(study: optuna.Study, *, but: int | None = None) -> list[FrozenTrial]:
    """The trials that have reported something, or ended before they could."""
    trials = study._get_trials(deepcopy=False, states=_STATES, use_cache=True)
    return [t for t in known(trials) if t.number != but]


def silent_rows(study: optuna.Study, space: Space, *, but: int) -> np.ndarray:
    """The configurations [n, parameters] of trials that run and have reported nothing yet."""
    trials = study._get_trials(deepcopy=False, states=(TrialState.RUNNING,), use_cache=True)
    silent = [t for t in trials if t.params and t.number != but and not t.intermediate_values]
    return np.array([space.row(t.params) for t in silent]).reshape(-1, len(space.names))


def posterior_of(
    study: optuna.Study, kept: Mapping[str, Any], lesson: Lesson, trials: int, *, name: str = FITTED
) -> Posterior:
    """What the points show, by hyperparameters of the study's; fitted here when those are old.

    Args:
        study: where they are kept.
        kept: what was kept last, by the same name.
        lesson: the points.
        trials: how many there are by now.
        name: of the system attribute; each metric has its own.
    """
    names, process = lesson.space.names, lesson.new_process
    if kept.get("names") == names and len(kept["theta"]) == len(process.theta):
        process = Process(process.owner, torch.tensor(kept["theta"], dtype=torch.float64), process.steady)
    else:
        kept = {}
    if trials >= REFIT * kept.get("trials", 0):
        process = lesson.fitted(process)
        fitted: Any = {"names": names, "trials": trials, "theta": process.theta.tolist()}
        study._storage.set_study_system_attr(study._study_id, name, fitted)
    return process.given(lesson.points, lesson.scores)


def believing(
    posterior: Posterior, space: Space, rows: np.ndarray, numbers: np.ndarray, silent: np.ndarray
) -> Posterior:
    """As if trials that run had ended as is foreseen.

    Args:
        posterior: what is known.
        space: whose rows follow.
        rows: of trials that have reported something [n, parameters].
        numbers: of these trials among the points [n]; -1 for one that has none.
        silent: rows of others [m, parameters].
    """
    if not len(rows) and not len(silent):
        return posterior
    apart = [*numbers.tolist(), *range(-2, -2 - len(silent), -1)]
    return posterior.believing(Points.at_the_end(space.features(np.concatenate([rows, silent])), apart))
