"""The observed points of learning curves, and the bounds of metrics."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from optuna.trial import FrozenTrial
from scipy.special import ndtri
from scipy.stats import rankdata

from hpsearch.storage.attributes import INFEASIBLE

MAX_POINTS = 600  # with more, half of the points are those of the longest and best trials, the others random
POINTS_PER_TRIAL = 2  # default of the maximum
_GRID_FACTOR = 1.5  # ratio of consecutive epochs of the grid


@dataclass(frozen=True)
class Observations:
    """Best values so far after given epochs.

    Attributes:
        trial: trial index of each observation [n].
        log_epoch: scaled log-epochs [n]: 0 after the first epoch, 1 after the last.
        loss: best loss so far [n]; infinite if there was no finite value.
    """

    trial: np.ndarray
    log_epoch: np.ndarray
    loss: np.ndarray

    @property
    def scores(self) -> np.ndarray:
        """Normal scores of the losses [n]: the normal quantiles of their ranks."""
        found: np.ndarray = ndtri((rankdata(self.loss) - 0.5) / len(self.loss))
        return found


def read_losses(trial: FrozenTrial, *, maximize: bool, epochs: int) -> dict[int, float]:
    """Return the losses by epoch, from 1; a diverged trial has infinite losses up to the last epoch."""
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
        curves: per trial, losses by epoch, from 1; none is empty.
        epochs: number of epochs of a full trial.
        random: random generator for subsampling.
        points_per_trial: maximum number of points of a trial: its last epochs on the grid.
        always: indices of trials whose points are always kept.
        so_far: whether a loss counts as the best one up to its epoch.
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
    return Observations(trials, np.log(after) / math.log(max(epochs, 2)), losses.astype(np.float64))


def _accumulate_best(curve: Mapping[int, float]) -> dict[int, float]:
    best, path = math.inf, {}
    for epoch in sorted(curve):
        best = min(best, math.inf if math.isnan(curve[epoch]) else curve[epoch])
        path[epoch] = best
    return path


def _select_last(path: Mapping[int, float], grid: Sequence[int], most: int) -> list[tuple[int, float]]:
    """Return the losses after the last epochs on the grid, and after the last epoch of all."""
    kept = {*[epoch for epoch in grid if epoch in path][-most:], max(path)}
    return [(epoch, path[epoch]) for epoch in sorted(kept)[-most:]]


def _make_grid(epochs: int) -> list[int]:
    """Return the epochs of observations, each about 1.5 times the one before."""
    found = [1]
    while found[-1] < epochs:
        found.append(min(epochs, max(found[-1] + 1, round(found[-1] * _GRID_FACTOR))))
    return found


PROPORTION_METRICS = frozenset({"accuracy", "macro_f1", "auroc", "average_precision"})  # between 0 and 1
_AT_MOST_1 = PROPORTION_METRICS | {"r2"}
_AT_LEAST_0 = frozenset({"loss", "rmse", "mae"})


def get_loss_bound(metric: str, best: float, *, maximize: bool) -> float:
    """Return the smallest possible loss of a metric, which is known by its name; a metric to maximize is negated.

    A user's metric may have the same name and another range, such as an accuracy in percent: if a value was better than
    the bound, there is none.

    Returns:
        Minus infinity if there is no bound.
    """
    if metric in _AT_MOST_1 and maximize:
        bound = -1.0
    elif metric in _AT_LEAST_0 and not maximize:
        bound = 0.0
    else:
        return -math.inf
    return bound if best >= bound else -math.inf
