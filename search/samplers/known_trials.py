"""The view of a study that samplers receive, which includes paused trials and the values of all metrics."""

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

Values = Mapping[int, Mapping[int, Sequence[float]]]  # values of all metrics, by trial id and step
States = Container[TrialState] | None

_RANK_STEP = 1e-300  # constraint violation that stands for one rank; smaller than any violation of a constraint


class SamplerStudyView(optuna.Study):
    """View of a study for samplers, in which paused trials appear as trials that were pruned after their last epoch.

    Optuna's samplers ignore waiting trials. But in studies with rungs, most observations are from paused trials, which
    are waiting. In a multi-objective study, each trial also has an attribute with the values of all metrics
    (`storage.attributes.VALUES`), and pruned trials have a rank, which TPE uses.

    Args:
        study_name, storage, options: arguments of `optuna.Study`.
        values: function for multi-objective studies that returns the values of all metrics, by trial id and step. It is
            called each time that trials are read.
    """

    def __init__(self, study_name: str, storage: Any, *, values: Callable[[], Values] = dict, **options: Any) -> None:
        super().__init__(study_name, storage, **options)
        self._values = values
        # Pruned trials with their last steps, and their order.
        self._cached_order: tuple[list[tuple[int, int]], list[int]] = ([], [])

    def _get_trials(self, deepcopy: bool = True, states: States = None, use_cache: bool = False) -> list[FrozenTrial]:
        if states is None or TrialState.PRUNED not in states:
            return super()._get_trials(deepcopy, states, use_cache)
        named = [state for state in TrialState if state in states]
        trials = super()._get_trials(deepcopy, [*named, TrialState.WAITING], use_cache)
        waits = TrialState.WAITING in named
        shown = [_show_as_pruned(t) for t in trials if t.state != TrialState.WAITING or t.intermediate_values or waits]
        return shown if len(self.directions) == 1 else self._with_values(shown)

    def _with_values(self, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
        """Return copies of trials with the values of all metrics, and with ranks of pruned trials.

        Pruned trials that violate no constraint get a rank: trials with more epochs first, and trials with the same
        number of epochs in the order of `sort_by_front`.
        """
        known, found = self._values(), []
        for trial in trials:
            attrs = {str(step): list(values) for step, values in known.get(trial._trial_id, {}).items()}
            found.append(_copy_with(trial, system_attrs=trial.system_attrs | ({VALUES: attrs} if attrs else {})))
        pruned = [trial for trial in found if trial.state == TrialState.PRUNED and not _violates_constraints(trial)]
        for rank, index in enumerate(self._sort(pruned), 1):
            pruned[index].system_attrs[RANK_CONSTRAINT] = rank * _RANK_STEP
        return found

    def _sort(self, pruned: Sequence[FrozenTrial]) -> list[int]:
        """Return the indices of pruned trials, the best trial first."""
        last_steps = [(trial._trial_id, max(trial.intermediate_values, default=-1)) for trial in pruned]
        if self._cached_order[0] != last_steps:
            maximize = [direction == StudyDirection.MAXIMIZE for direction in self.directions]
            by_step: dict[int, list[int]] = {}
            for index, (_, step) in enumerate(last_steps):
                by_step.setdefault(step, []).append(index)
            order: list[int] = []
            for step in sorted(by_step, reverse=True):
                losses = np.array([get_objective_vector(pruned[index], maximize) for index in by_step[step]])
                order += [by_step[step][member] for member in sort_by_front(losses)]
            self._cached_order = last_steps, order
        return self._cached_order[1]


def _violates_constraints(trial: FrozenTrial) -> bool:
    return any(value > 0 for value in trial.constraints.values())


def _copy_with(trial: FrozenTrial, **attributes: Any) -> FrozenTrial:
    copied = copy.copy(trial)
    for name, value in attributes.items():
        setattr(copied, name, value)
    return copied


def make_sampler_study_view(study: optuna.Study, values: Callable[[], Values] = dict) -> SamplerStudyView:
    """Return the view of a study that its sampler receives; `values` is that of `SamplerStudyView`."""
    return SamplerStudyView(study.study_name, study._storage, sampler=study.sampler, pruner=study.pruner, values=values)


def _show_as_pruned(trial: FrozenTrial) -> FrozenTrial:
    is_paused = trial.state == TrialState.WAITING and trial.intermediate_values
    return _copy_with(trial, state=TrialState.PRUNED) if is_paused else trial
