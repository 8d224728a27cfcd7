"""The view of a study that samplers receive, which includes paused trials and the values of all metrics."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from hpsearch.storage.attributes import VALUES

Values = Mapping[int, Mapping[int, Sequence[float]]]  # values of all metrics, by trial id and step
States = Container[TrialState] | None


class SamplerStudyView(optuna.Study):
    """View of a study for samplers, in which paused trials appear as trials that were pruned after their last epoch.

    Optuna's samplers ignore waiting trials. But in studies with rungs, most observations are from paused trials, which
    are waiting. In a multi-objective study, each trial also has an attribute with the values of all metrics
    (`storage.attributes.VALUES`).

    Args:
        study_name, storage, options: arguments of `optuna.Study`.
        values: function for multi-objective studies that returns the values of all metrics, by trial id and step. It is
            called each time that trials are read.
    """

    def __init__(self, study_name: str, storage: Any, *, values: Callable[[], Values] = dict, **options: Any) -> None:
        super().__init__(study_name, storage, **options)
        self._values = values

    def _get_trials(self, deepcopy: bool = True, states: States = None, use_cache: bool = False) -> list[FrozenTrial]:
        if states is None or TrialState.PRUNED not in states:
            return super()._get_trials(deepcopy, states, use_cache)
        named = [state for state in TrialState if state in states]
        trials = super()._get_trials(deepcopy, [*named, TrialState.WAITING], use_cache)
        waits = TrialState.WAITING in named
        shown = [_show_as_pruned(t) for t in trials if t.state != TrialState.WAITING or t.intermediate_values or waits]
        return shown if len(self.directions) == 1 else self._with_values(shown)

    def _with_values(self, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
        """Return copies of trials with the values of all metrics."""
        known, found = self._values(), []
        for trial in trials:
            attrs = {str(step): list(values) for step, values in known.get(trial._trial_id, {}).items()}
            found.append(copy_with(trial, system_attrs=trial.system_attrs | ({VALUES: attrs} if attrs else {})))
        return found


def copy_with(trial: FrozenTrial, **attributes: Any) -> FrozenTrial:
    """Return a copy of a trial with other values of the given attributes."""
    copied = copy.copy(trial)
    for name, value in attributes.items():
        setattr(copied, name, value)
    return copied


def make_sampler_study_view(study: optuna.Study, values: Callable[[], Values] = dict) -> SamplerStudyView:
    """Return the view of a study that its sampler receives; `values` is that of `SamplerStudyView`."""
    return SamplerStudyView(study.study_name, study._storage, sampler=study.sampler, pruner=study.pruner, values=values)


def _show_as_pruned(trial: FrozenTrial) -> FrozenTrial:
    is_paused = trial.state == TrialState.WAITING and trial.intermediate_values
    return copy_with(trial, state=TrialState.PRUNED) if is_paused else trial
