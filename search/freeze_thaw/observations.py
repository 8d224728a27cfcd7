"""Observed points of learning curves."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from optuna.trial import FrozenTrial
from scipy.special import ndtri
from scipy.stats import rankdata

from hpsearch.storage.attributes import INFEASIBLE

MAX_POINTS = 600  # maximum number of points: half from the longest and best trials, the other half a random sample
POINTS_PER_TRIAL = 2  # default maximum number of points per trial
_GRID_FACTOR = 1.5  # ratio of consecutive epochs in the grid of epochs


@dataclass(frozen=True)
class Observations:
    """Best values that trials have reached after given epochs.

    Attributes:
        trial: trial index of each observation [n].
        log_epoch: scaled log-epochs [n]: 0 after the first epoch, 1 after the last (also if there is only one).
        loss: best loss so far [n]; infinite if no value was finite.
    """

    trial: np.ndarray
    log_epoch: np.ndarray
    loss: np.ndarray

    @property
    def scores(self) -> np.ndarray:
        """Normal scores of the losses [n]: quantiles of the standard normal distribution, by rank of the loss."""
        found: np.ndarray = ndtri((rankdata(self.loss) - 0.5) / len(self.loss))
        return found


def read_losses(trial: FrozenTrial, *, maximize: bool, epochs: int) -> dict[int, float]:
    """Return the losses of a trial by epoch, from 1.

    A trial that is infeasible or has no finite value has infinite losses at the first and the last epoch.
    """
    sign = -1.0 if maximize else 1.0
    found = {step + 1: sign * value for step, value in trial.intermediate_values.items()}
    if trial.user_attrs.get(INFEASIBLE) or not any(map(math.isfinite, found.values())):
        return {1: math.inf, epochs: math.inf}
    return found


def select_observations(
    curves: Sequence[Mapping[int, float]],
    epochs: int,
    random: np.random.Generator,
    *,
    points_per_trial: int = POINTS_PER_TRIAL,
    always: Container[int] = (),
    so_far: bool = True,
) -> Observations:
    """Select the observations that the Gaussian process uses.

    Args:
        curves: per trial, losses by epoch, from 1; each trial has at least one loss.
        epochs: number of epochs of a full trial.
        random: random generator for subsampling.
        points_per_trial: maximum number of points of a trial, which are at the trial's last epochs in the grid.
        always: indices of trials whose points are kept when the points are subsampled.
        so_far: whether to replace each loss by the best loss up to its epoch.
    """
    if not curves:
        return Observations(np.empty(0, dtype=np.int64), np.empty(0), np.empty(0))
    grid = _make_grid(epochs)
    paths = [_accumulate_best(curve) if so_far else curve for curve in curves]
    found = [
        (trial, epoch, loss)
        for trial, path in enumerate(paths)
        for epoch, loss in _select_last(path, grid, points_per_trial)
    ]
    if len(found) > MAX_POINTS:
        stay = [i for i, (trial, _, _) in enumerate(found) if trial in always]
        others = [i for i, (trial, _, _) in enumerate(found) if trial not in always]
        room = max(MAX_POINTS - len(stay), 0)
        best = sorted(others, key=lambda i: (-found[i][1], found[i][2], i))
        drawn = random.choice(best[room // 2 :], room - room // 2, replace=False)
        found = [found[i] for i in sorted([*stay, *best[: room // 2], *map(int, drawn)])]
    trials, after, losses = (np.array(column) for column in zip(*found, strict=True))
    scaled = np.log(after) / math.log(epochs) if epochs > 1 else np.ones(len(after))
    return Observations(trials, scaled, losses.astype(np.float64))


def _accumulate_best(curve: Mapping[int, float]) -> dict[int, float]:
    best, path = math.inf, {}
    for epoch in sorted(curve):
        best = min(best, math.inf if math.isnan(curve[epoch]) else curve[epoch])
        path[epoch] = best
    return path


def _select_last(path: Mapping[int, float], grid: Sequence[int], most: int) -> list[tuple[int, float]]:
    """Return at most `most` (epoch, loss) of a trial: at its last epoch, and at its last epochs in the grid."""
    kept = {*[epoch for epoch in grid if epoch in path][-most:], max(path)}
    return [(epoch, path[epoch]) for epoch in sorted(kept)[-most:]]


def _make_grid(epochs: int) -> list[int]:
    """Return the grid of epochs for observations, in which each epoch is about 1.5 times the previous epoch."""
    found = [1]
    while found[-1] < epochs:
        found.append(min(epochs, max(found[-1] + 1, round(found[-1] * _GRID_FACTOR))))
    return found
