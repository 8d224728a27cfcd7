"""The trials that a sampler sees: paused trials and trials with several objectives included."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.freeze_thaw.multi_objective import get_objective_vector
from hpsearch.storage.attributes import RANK_CONSTRAINT, VALUES
from hpsearch.storage.rungs.fronts import sort_by_front

Values = Mapping[int, Mapping[int, Sequence[float]]]  # of all metrics, by the trial's id and step

_LEAST = 1e-300  # of a place: no constraint is broken by less


class SampledStudy(optuna.Study):
    """Shows waiting trials that have values as pruned after their last epoch.

    Samplers pass over waiting trials, and where trials are paused most of what is known is theirs. Of a study of
    several metrics each trial has all its values (`storage.attributes.VALUES`), and those that were pruned are in an
    order that TPE keeps to.

    Args:
        study_name, storage, options: as of Optuna's study.
        values: of a study of several metrics, gives those of all trials, by id and step; called at each reading.
    """

    def __init__(self, study_name: str, storage: Any, *, values: Callable[[], Values] = dict, **options: Any) -> None:
        super().__init__(study_name, storage, **options)
        self._values = values
        self._placed: tuple[list[tuple[int, int]], list[int]] = ([], [])  # pruned trials, and their order

    def _get_trials(
        self, deepcopy: bool = True, states: Container[TrialState] | None = None, use_cache: bool = False
    ) -> list[FrozenTrial]:
        if states is None or TrialState.PRUNED not in states:
            return super()._get_trials(deepcopy, states, use_cache)
        named = [state for state in TrialState if state in states]
        trials = super()._get_trials(deepcopy, [*named, TrialState.WAITING], use_cache)
        waiting_too = TrialState.WAITING in named
        shown = [_shown(t) for t in trials if t.state != TrialState.WAITING or t.intermediate_values or waiting_too]
        return shown if len(self.directions) == 1 else self._with_values(shown)

    def _with_values(self, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
        """Return copies of trials with all known values; pruned ones that satisfy the constraints also with a place.

        Trials with more epochs come first; among those with as many, the fronts and their spread decide.
        """
        known, found = self._values(), []
        for trial in trials:
            attrs = {str(step): list(values) for step, values in known.get(trial._trial_id, {}).items()}
            found.append(_changed(trial, system_attrs=trial.system_attrs | ({VALUES: attrs} if attrs else {})))
        pruned = [trial for trial in found if trial.state == TrialState.PRUNED and not _breaks(trial)]
        for place, index in enumerate(self._order(pruned), 1):
            pruned[index].system_attrs[RANK_CONSTRAINT] = place * _LEAST
        return found

    def _order(self, pruned: Sequence[FrozenTrial]) -> list[int]:
        """Return the indices of trials, the best first."""
        came = [(trial._trial_id, max(trial.intermediate_values, default=-1)) for trial in pruned]
        if self._placed[0] != came:
            maximize = [direction == StudyDirection.MAXIMIZE for direction in self.directions]
            at: dict[int, list[int]] = {}
            for index, (_, step) in enumerate(came):
                at.setdefault(step, []).append(index)
            places: list[int] = []
            for step in sorted(at, reverse=True):
                worths = np.array([get_objective_vector(pruned[index], maximize) for index in at[step]])
                places += [at[step][member] for member in sort_by_front(worths)]
            self._placed = came, places
        return self._placed[1]


def _breaks(trial: FrozenTrial) -> bool:
    return any(value > 0 for value in trial.constraints.values())


def _changed(trial: FrozenTrial, **attributes: Any) -> FrozenTrial:
    shown = copy.copy(trial)
    for name, value in attributes.items():
        setattr(shown, name, value)
    return shown


def as_sampled(study: optuna.Study, values: Callable[[], Values] = dict) -> SampledStudy:
    """Return a study as its sampler is to see it; `values` as of `SampledStudy`."""
    return SampledStudy(study.study_name, study._storage, sampler=study.sampler, pruner=study.pruner, values=values)


def _shown(trial: FrozenTrial) -> FrozenTrial:
    paused = trial.state == TrialState.WAITING and trial.intermediate_values
    return _changed(trial, state=TrialState.PRUNED) if paused else trial
