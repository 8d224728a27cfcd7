"""Which of several vectors of metrics are better than others: fronts, the spread within one, and hypervolume.

All is said of *losses* [n, metrics], of which lower is better; :func:`losses_of` makes them from values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Losses = NDArray[np.float64]


def losses_of(values: Sequence[Sequence[float]], maximize: Sequence[bool]) -> Losses:
    """Return values [n, metrics] as losses, whatever of them is better when it is higher.

    A NaN is as bad as can be.
    """
    signs = np.where(np.asarray(maximize, dtype=bool), -1.0, 1.0)
    losses = np.asarray(values, dtype=float).reshape(-1, len(signs)) * signs
    return np.where(np.isnan(losses), np.inf, losses)


def ranks(losses: Losses) -> NDArray[np.int64]:
    """Return the front that each vector is in, from 0: that of those which none dominates, then of the rest, and so on.

    Fast non-dominated sorting (Deb et al. 2002); equal vectors are in the same front.
    """
    if not len(losses):
        return np.zeros(0, dtype=np.int64)
    if losses.shape[1] == 1:
        return np.unique(losses[:, 0], return_inverse=True)[1].astype(np.int64)
    import moocore  # a third of a second, which studies of one metric need not spend

    return np.asarray(moocore.pareto_rank(losses), dtype=np.int64)


def front(losses: Losses) -> list[int]:
    """Return the places of the vectors that none dominates."""
    return [int(place) for place in np.flatnonzero(ranks(losses) == 0)]


def dominating(losses: Losses) -> NDArray[np.int64]:
    """Return by how many others each vector is dominated: no worse in any metric, better in one."""
    no_worse = (losses[:, None] <= losses[None]).all(axis=2)
    better = (losses[:, None] < losses[None]).any(axis=2)
    return np.asarray((no_worse & better).sum(axis=0), dtype=np.int64)


def crowding(losses: Losses) -> NDArray[np.float64]:
    """Return the crowding distance of each vector of one front (Deb et al. 2002): the more room about it, the larger.

    It is infinite at the ends of the front. Of equal vectors the first has the room about them all, the others none.
    """
    distances = np.zeros(len(losses))
    _, firsts = np.unique(losses, axis=0, return_index=True)
    unique = losses[firsts]
    for metric in unique.T:
        order = np.argsort(metric, kind="stable")
        ordered = metric[order]
        width = ordered[-1] - ordered[0]
        ends = [order[0], order[-1]]
        distances[firsts[ends]] = np.inf
        if np.isfinite(width) and width > 0:
            distances[firsts[order[1:-1]]] += (ordered[2:] - ordered[:-2]) / width
    return distances


def best_first(losses: Losses) -> list[int]:
    """Return the places of the vectors in order: by their front, within one by crowding distance, then by place."""
    rank, room = ranks(losses), np.zeros(len(losses))
    for each in np.unique(rank):
        members = np.flatnonzero(rank == each)
        room[members] = crowding(losses[members])
    return [int(place) for place in np.lexsort((np.arange(len(losses)), -room, rank))]


def hypervolume(losses: Losses, reference: Sequence[float]) -> float:
    """Return the volume that is dominated by the vectors, up to a reference that is as bad as anything counts.

    Args:
        losses: [n, metrics]; those that are not better than the reference in every metric add nothing.
        reference: [metrics], as losses.
    """
    within = losses[(losses < np.asarray(reference)).all(axis=1)]
    if not len(within):
        return 0.0
    import moocore  # as above

    return float(moocore.hypervolume(within, ref=np.asarray(reference, dtype=float)))
