"""What a trial of several metrics is worth: the vector of its values at the epoch that the first metric finds best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from optuna.trial import FrozenTrial

from hpsearch.storage.attributes import INFEASIBLE, VALUES
from hpsearch.storage.pareto import losses_of


def values_by_epoch(trial: FrozenTrial, metrics: int) -> dict[int, list[float]]:
    """All values of a trial by epoch, from 1; NaN where only those of the first metric are known.

    Args:
        trial: as samplers are shown it.
        metrics: how many there are.
    """
    every: Mapping[str, Sequence[float]] = trial.system_attrs.get(VALUES, {})
    found = {step + 1: [first, *[np.nan] * (metrics - 1)] for step, first in trial.intermediate_values.items()}
    return dict(sorted((found | {int(step) + 1: list(values) for step, values in every.items()}).items()))


def path(values: Mapping[int, Sequence[float]], maximize: Sequence[bool]) -> dict[int, np.ndarray]:
    """What a trial was worth after each epoch, as losses [metrics]; infinite where no first value was a number.

    Args:
        values: of all metrics, by epoch in ascending order.
        maximize: of each metric, whether higher values are better.
    """
    found: dict[int, np.ndarray] = {}
    best = np.full(len(maximize), np.inf)
    losses = losses_of(list(values.values()), maximize)
    for epoch, vector in zip(values, losses, strict=True):
        best = vector if vector[0] < best[0] else best
        found[epoch] = best
    return found


def worth(trial: FrozenTrial, maximize: Sequence[bool]) -> np.ndarray:
    """What a trial is worth by now, as losses [metrics]; of one that has diverged, or reported nothing, infinite ones.

    Args:
        trial: as samplers are shown it.
        maximize: of each metric, whether higher values are better.
    """
    values = values_by_epoch(trial, len(maximize))
    if trial.user_attrs.get(INFEASIBLE) or not values:
        return np.full(len(maximize), np.inf)
    return path(values, maximize)[max(values)]
