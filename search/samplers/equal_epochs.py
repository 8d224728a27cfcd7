"""The comparison of trials that trained for different numbers of epochs, as in BOHB (Falkner et al. 2018)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.freeze_thaw.multi_objective import get_max_violation, read_values_by_epoch, track_incumbent
from hpsearch.search.samplers.known_trials import States, copy_with
from hpsearch.storage.attributes import INFEASIBLE
from hpsearch.storage.rungs.fronts import to_losses

MIN_COMPARED = 10  # minimum number of compared trials

_SEEN = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)


def has_pruned_trials(study: optuna.Study) -> bool:
    """Return whether a study has pruned trials; in a `SamplerStudyView`, paused trials are pruned."""
    return bool(study._get_trials(False, states=(TrialState.PRUNED,), use_cache=True))


class EqualEpochsView:
    """View of a study for a sampler, in which all finished trials have their values after the same epoch.

    Otherwise a sampler would take a trial that trained longer for a better one. The epoch is the last one that enough
    trials have reached: `min_trials`, and at least one more than a trial has parameters. Trials that reached it are
    COMPLETE with their best values up to it, also if they are pruned, paused or running. Running trials that did not
    reach it are still RUNNING. Trials that diverged have the worst values, and the largest constraint violations, of
    the others.

    Args:
        study: the study; paused trials are visible if it is a `SamplerStudyView`.
        min_trials: minimum number of compared trials, if the study has as many.
        has_short_trials: whether pruned and paused trials that did not reach the epoch are in the view, COMPLETE with
            their best values; otherwise they are omitted, unless they are infeasible.
    """

    def __init__(self, study: optuna.Study, min_trials: int = MIN_COMPARED, *, has_short_trials: bool = False) -> None:
        self._study, self._min_trials, self._has_short_trials = study, min_trials, has_short_trials

    def __getattr__(self, name: str) -> Any:
        return getattr(self._study, name)

    def _get_trials(self, deepcopy: bool = True, states: States = None, use_cache: bool = False) -> list[FrozenTrial]:
        maximize = [direction == StudyDirection.MAXIMIZE for direction in self._study.directions]
        trials = self._study._get_trials(deepcopy, _SEEN, use_cache)
        least = max([self._min_trials, *(len(trial.params) + 1 for trial in trials)])
        step = choose_step([_get_last_step(trial) for trial in trials], least)
        violations = _find_largest_violations(trials)
        ended_step = 0 if self._has_short_trials else step
        steps = {t.number: step if t.state == TrialState.RUNNING else ended_step for t in trials}
        compared = {
            t.number: _get_losses(t, step, maximize) for t in trials if _is_compared(t, steps[t.number], violations)
        }
        worst = _find_largest_finite(compared.values(), len(maximize))
        signs = np.where(maximize, -1.0, 1.0)
        shown: list[FrozenTrial] = []
        for trial in trials:
            if trial.number in compared:
                losses = np.where(np.isfinite(compared[trial.number]), compared[trial.number], worst)
                attrs = {f"constraints:{name}": most for name, most in violations.items()} | trial.system_attrs
                values = (signs * losses).tolist()
                shown.append(copy_with(trial, state=TrialState.COMPLETE, values=values, system_attrs=attrs))
            elif trial.state == TrialState.RUNNING:
                shown.append(trial)
        return [trial for trial in shown if states is None or trial.state in states]


def choose_step(last_steps: Sequence[int], least: int) -> int:
    """Return the last step that at least `least` trials have reached; the first step if there are fewer trials.

    Args:
        last_steps: last step of each trial; negative for a trial without values.
        least: minimum number of trials.
    """
    reached = sorted(last_steps, reverse=True)
    return max(reached[least - 1], 0) if len(reached) >= least else 0


def _get_last_step(trial: FrozenTrial) -> int:
    """Return the last reported step; a COMPLETE trial has reached all steps."""
    return sys.maxsize if trial.state == TrialState.COMPLETE else max(trial.intermediate_values, default=-1)


def _find_largest_finite(losses: Iterable[np.ndarray], metrics: int) -> np.ndarray:
    """Return the largest finite loss of each metric [metrics]; 0 for a metric without a finite loss."""
    every = np.array([*losses]).reshape(-1, metrics)
    largest: np.ndarray = np.where(np.isfinite(every), every, -np.inf).max(0, initial=-np.inf)
    return np.where(np.isfinite(largest), largest, 0.0)


def _find_largest_violations(trials: Sequence[FrozenTrial]) -> dict[str, float]:
    """Return the largest violation of each constraint, by name."""
    found: dict[str, float] = {}
    for trial in trials:
        for name, violation in trial.constraints.items():
            found[name] = max(found.get(name, violation), violation)
    return found


def _is_compared(trial: FrozenTrial, step: int, constraints: Mapping[str, float]) -> bool:
    if trial.state != TrialState.RUNNING and (INFEASIBLE in trial.user_attrs or get_max_violation(trial) > 0):
        return True
    # Optuna's GPSampler needs all constraints of each trial. A running trial has none before its first rung.
    return _get_last_step(trial) >= step and trial.constraints.keys() == constraints.keys()


def _get_losses(trial: FrozenTrial, step: int, maximize: Sequence[bool]) -> np.ndarray:
    """Return the losses [metrics] at the best epoch up to a step; infinite if the trial diverged or has no values."""
    if INFEASIBLE in trial.user_attrs:
        return np.full(len(maximize), np.inf)
    if trial.state == TrialState.COMPLETE and max(trial.intermediate_values, default=-1) <= step:
        losses: np.ndarray = to_losses([trial.values], maximize)[0]
        return losses
    values = read_values_by_epoch(trial, len(maximize))
    until = {epoch: vector for epoch, vector in values.items() if epoch <= step + 1}
    best = track_incumbent(until, maximize)
    return best[max(until)] if until else np.full(len(maximize), np.inf)
