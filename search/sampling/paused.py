"""A study as a sampler is to see it: what a trial reported before it was paused, or given back, counts already."""

from __future__ import annotations

import copy
from collections.abc import Container

import optuna
from optuna.trial import FrozenTrial, TrialState


class SampledStudy(optuna.Study):
    """Shows waiting trials that have values as pruned after their last epoch.

    Samplers pass over waiting trials, and where trials are paused most of what is known is theirs.
    """

    def _get_trials(
        self, deepcopy: bool = True, states: Container[TrialState] | None = None, use_cache: bool = False
    ) -> list[FrozenTrial]:
        if states is None or TrialState.PRUNED not in states:
            return super()._get_trials(deepcopy, states, use_cache)
        named = [state for state in TrialState if state in states]
        trials = super()._get_trials(deepcopy, [*named, TrialState.WAITING], use_cache)
        waiting_too = TrialState.WAITING in named
        return [_shown(t) for t in trials if t.state != TrialState.WAITING or t.intermediate_values or waiting_too]


def as_sampled(study: optuna.Study) -> SampledStudy:
    """Return a study as its sampler is to see it."""
    return SampledStudy(study.study_name, study._storage, sampler=study.sampler, pruner=study.pruner)


def _shown(trial: FrozenTrial) -> FrozenTrial:
    if trial.state != TrialState.WAITING or not trial.intermediate_values:
        return trial
    shown = copy.copy(trial)
    shown.state = TrialState.PRUNED
    return shown
