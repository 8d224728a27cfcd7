"""Trials of a study of several metrics as its sampler is shown them: with all their values, and in an order.

Optuna's TPE would sort pruned trials by the study's one direction. Those that break a constraint it takes after the
complete ones, by how much they break it: so the copies of pruned trials that are shown break one by their place, and by
so little that whoever truly breaks one comes after them all. No other sampler of Optuna's looks at pruned trials.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.curves.vectors import worth
from hpsearch.storage.attributes import PLACE, VALUES
from hpsearch.storage.rungs.front_order import order

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
