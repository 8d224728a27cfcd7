"""The trials that a sampler sees: paused trials and trials with several objectives included."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.curves.multi_objective import worth
from hpsearch.storage.attributes import PLACE, VALUES
from hpsearch.storage.rungs.fronts import order

Values = Mapping[int, Mapping[int, Sequence[float]]]  # of all metrics, by the trial's id and step

_LEAST = 1e-300  # of a place: no constraint is broken by less


class View:
    """Shows trials; remembers the places of pruned ones until there are others.

    Args:
        directions: of the study.
        values: gives those of all metrics; called at each reading.
    """

    def __init__(self, directions: Sequence[StudyDirection], values: Callable[[], Values] | None) -> None:
        self._maximize = [direction == StudyDirection.MAXIMIZE for direction in directions]
        self._values = values
        self._placed: tuple[list[tuple[int, int]], list[int]] = ([], [])

    def shown(self, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
        """Copies of trials: with all values that are known, and pruned ones that break no constraint with their place.

        Who came further is before the others; among those that came as far, the fronts and their spread decide.
        """
        known = self._values() if self._values is not None else {}
        found = [_with(trial, _values_of(trial, known)) for trial in trials]
        pruned = [trial for trial in found if trial.state == TrialState.PRUNED and not _breaks(trial)]
        for place, index in enumerate(self._order(pruned), 1):
            pruned[index].system_attrs[PLACE] = place * _LEAST
        return found

    def _order(self, pruned: Sequence[FrozenTrial]) -> list[int]:
        """Indices of trials, the best first."""
        came = [(trial._trial_id, max(trial.intermediate_values, default=-1)) for trial in pruned]
        if self._placed[0] != came:
            at: dict[int, list[int]] = {}
            for index, (_, step) in enumerate(came):
                at.setdefault(step, []).append(index)
            places: list[int] = []
            for step in sorted(at, reverse=True):
                worths = np.array([worth(pruned[index], self._maximize) for index in at[step]])
                places += [at[step][member] for member in order(worths)]
            self._placed = came, places
        return self._placed[1]


def _values_of(trial: FrozenTrial, known: Values) -> dict[str, Any]:
    values = known.get(trial._trial_id)
    return {VALUES: {str(step): list(found) for step, found in values.items()}} if values else {}


def _breaks(trial: FrozenTrial) -> bool:
    return any(value > 0 for value in trial.constraints.values())


def _with(trial: FrozenTrial, attrs: Mapping[str, Any]) -> FrozenTrial:
    shown = copy.copy(trial)
    shown.system_attrs = {**trial.system_attrs, **attrs}
    return shown


class SampledStudy(optuna.Study):
    """Shows waiting trials that have values as pruned after their last epoch.

    Samplers pass over waiting trials, and where trials are paused most of what is known is theirs. Of a study of
    several metrics each trial has all its values (`storage.attributes.VALUES`), and those that were pruned are in an
    order that TPE keeps to.

    Args:
        study_name, storage, options: as of Optuna's study.
        values: of a study of several metrics, gives those of all trials, by id and step; called at each reading.
    """

    def __init__(
        self, study_name: str, storage: Any, *, values: Callable[[], Values] | None = None, **options: Any
    ) -> None:
        super().__init__(study_name, storage, **options)
        self._view = View(self.directions, values)

    def _get_trials(
        self, deepcopy: bool = True, states: Container[TrialState] | None = None, use_cache: bool = False
    ) -> list[FrozenTrial]:
        if states is None or TrialState.PRUNED not in states:
            return super()._get_trials(deepcopy, states, use_cache)
        named = [state for state in TrialState if state in states]
        trials = super()._get_trials(deepcopy, [*named, TrialState.WAITING], use_cache)
        waiting_too = TrialState.WAITING in named
        shown = [_shown(t) for t in trials if t.state != TrialState.WAITING or t.intermediate_values or waiting_too]
        return shown if len(self.directions) == 1 else self._view.shown(shown)


def as_sampled(study: optuna.Study, values: Callable[[], Values] | None = None) -> SampledStudy:
    """Return a study as its sampler is to see it; `values` as of `SampledStudy`."""
    return SampledStudy(study.study_name, study._storage, sampler=study.sampler, pruner=study.pruner, values=values)


def _shown(trial: FrozenTrial) -> FrozenTrial:
    if trial.state != TrialState.WAITING or not trial.intermediate_values:
        return trial
    shown = copy.copy(trial)
    shown.state = TrialState.PRUNED
    return shown
