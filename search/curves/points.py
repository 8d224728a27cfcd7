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

MOST = 600  # points, beyond which those are drawn that are neither of the longest nor of the best trials
OF_EACH = 2  # points of a trial, at most, unless it is said otherwise
_STRIDE = 1.5  # from one epoch of the grid to the next


@dataclass(frozen=True)
class Seen:
    """Best values so far, after some epochs.

    Attributes:
        trial: index of the trial of each [n].
        s: logarithm of the epochs, 0 after the first, 1 after the last [n].
        loss: the best value so far, lower is better; infinite where there was none [n].
    """

    trial: np.ndarray
    s: np.ndarray
    loss: np.ndarray

    @property
    def scores(self) -> np.ndarray:
        """Normal scores of the values [n]: what a normal distribution has at their ranks."""
        found: np.ndarray = ndtri((rankdata(self.loss) - 0.5) / len(self.loss))
        return found


def losses(trial: FrozenTrial, *, maximize: bool, epochs: int) -> dict[int, float]:
    """Values by epoch, from 1, as lower is better; those of a trial that diverged are as bad as any, to its end."""
    sign = -1.0 if maximize else 1.0
    found = {step + 1: sign * value for step, value in trial.intermediate_values.items()}
    if trial.user_attrs.get(INFEASIBLE) or not any(map(math.isfinite, found.values())):
        return {1: math.inf, epochs: math.inf}
    return found


def seen(
    curves: Sequence[Mapping[int, float]],
    epochs: int,
    random: np.random.Generator,
    *,
    of_each: int = OF_EACH,
    always: Container[int] = (),
    so_far: bool = True,
) -> Seen:
    """The points that a process learns from.

    Args:
        curves: of each trial its losses by epoch, from 1; none is empty, and there may be none.
        epochs: of a full trial.
        random: chooses where there are too many.
        of_each: points of a trial, at most: of the last epochs on the grid.
        always: indices of trials whose points stay, however many there are.
        so_far: whether a loss counts as the best one up to its epoch.
    """
    if not curves:
        return Seen(np.empty(0, dtype=np.int64), np.empty(0), np.empty(0))
    grid = _grid(epochs)
    paths = [_best_so_far(curve) if so_far else curve for curve in curves]
    found = [(trial, epoch, loss) for trial, path in enumerate(paths) for epoch, loss in _last(path, grid, of_each)]
    if len(found) > MOST:
        stay = [i for i, (trial, _, _) in enumerate(found) if trial in always]
        others = [i for i, (trial, _, _) in enumerate(found) if trial not in always]
        room = max(MOST - len(stay), 0)
        best = sorted(others, key=lambda i: (-found[i][1], found[i][2], i))
        drawn = random.choice(best[room // 2 :], room - room // 2, replace=False)
        found = [found[i] for i in sorted([*stay, *best[: room // 2], *map(int, drawn)])]
    trials, after, losses = (np.array(column) for column in zip(*found, strict=True))
    return Seen(trials, np.log(after) / math.log(max(epochs, 2)), losses.astype(np.float64))


def _best_so_far(curve: Mapping[int, float]) -> dict[int, float]:
    best, path = math.inf, {}
    for epoch in sorted(curve):
        best = min(best, math.inf if math.isnan(curve[epoch]) else curve[epoch])
        path[epoch] = best
    return path


def _last(path: Mapping[int, float], grid: Sequence[int], most: int) -> list[tuple[int, float]]:
    """The losses after the last epochs on the grid, and after the very last one."""
    kept = {*[epoch for epoch in grid if epoch in path][-most:], max(path)}
    return [(epoch, path[epoch]) for epoch in sorted(kept)[-most:]]


def _grid(epochs: int) -> list[int]:
    """Epochs at which values are looked at, each half as far again as the one before."""
    found = [1]
    while found[-1] < epochs:
        found.append(min(epochs, max(found[-1] + 1, round(found[-1] * _STRIDE))))
    return found


SHARES = frozenset({"accuracy", "macro_f1", "auroc", "average_precision"})  # between 0 and 1
_AT_MOST_1 = SHARES | {"r2"}
_AT_LEAST_0 = frozenset({"loss", "rmse", "mae"})


def least_loss(metric: str, best: float, *, maximize: bool) -> float:
    """The best that a metric can be, as a loss: values with the other sign where higher ones are better.

    A metric is known by its name, and somebody's own of that name may be another, such as an accuracy in per cent:
    one that was better than its bound has none.

    Returns:
        Minus infinity of a metric that is not known.
    """
    if metric in _AT_MOST_1 and maximize:
        bound = -1.0
    elif metric in _AT_LEAST_0 and not maximize:
        bound = 0.0
    else:
        return -math.inf
    return bound if best >= bound else -math.inf
