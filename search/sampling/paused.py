"""A study as a sampler is to see it: what a trial reported before it was paused, or given back, counts already."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.sampling.several import Values, View


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
