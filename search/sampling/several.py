"""Trials of a study of several metrics as its sampler is shown them: with all their values, and in an order.

Optuna's TPE would sort pruned trials by the study's one direction. Those that break a constraint it takes after the
complete ones, by how much they break it: so the copies of pruned trials that are shown break one by their place, and by
so little that whoever truly breaks one comes after them all. No other sampler of Optuna's looks at pruned trials.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from search.curves.vectors import worth
from storage.attributes import PLACE, VALUES
from storage.trials.front_order import order

Values = Mapping[int, Mapping[int, Sequence[float]]]  # of all metrics, by the trial's id and step

_LEAST = 1e-300  # of a place: no constraint is broken by less


def with_values(trial: FrozenTrial, values: Values) -> FrozenTrial:
    """Return a trial with the values of all metrics, as far as they are known."""
    known = values.get(trial._trial_id)
    return trial if not known else _with(trial, VALUES, {str(step): list(found) for step, found in known.items()})


def with_places(trials: Sequence[FrozenTrial], directions: Sequence[StudyDirection]) -> list[FrozenTrial]:
    """Return trials, of which the pruned ones that break no constraint have their place among each other.

    Who came further is before the others; among those that came as far, the fronts and their spread decide.
    """
    maximize = [direction == StudyDirection.MAXIMIZE for direction in directions]
    at: dict[int, list[int]] = {}
    for index, trial in enumerate(trials):
        if trial.state == TrialState.PRUNED and not _breaks(trial):
            at.setdefault(max(trial.intermediate_values, default=-1), []).append(index)
    found = list(trials)
    place = 0
    for step in sorted(at, reverse=True):
        worths = np.array([worth(trials[index], maximize) for index in at[step]])
        for member in order(worths):
            index, place = at[step][member], place + 1
            found[index] = _with(trials[index], PLACE, place * _LEAST)
    return found


def _breaks(trial: FrozenTrial) -> bool:
    return any(value > 0 for value in trial.constraints.values())


def _with(trial: FrozenTrial, name: str, value: Any) -> FrozenTrial:
    shown = copy.copy(trial)
    shown.system_attrs = {**trial.system_attrs, name: value}
    return shown
