"""The order of several metrics' trials at a rung: who goes on first.

By front (fast non-dominated sorting, Deb et al. 2002), and within one so that those who go on are spread over it: by a
greedy epsilon-net, as multi-objective asynchronous successive halving has it (Schmucker et al. 2021, after Clarkson
2006). In simulated searches the crowding distance of NSGA-II did a little worse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hpsearch.storage.pareto import ranks

if TYPE_CHECKING:
    from hpsearch.storage.pareto import Losses


def order(losses: Losses, most: int | None = None) -> list[int]:
    """Return the places of the vectors, the best first: by front, within one by how they spread, then by place.

    Args:
        losses: [n, metrics], lower is better; in the order of the trials, the earliest first. A trial whose first
            metric is infinite has failed, and comes after all others, however good it is otherwise.
        most: how many are asked for; None for all.
    """
    count = len(losses) if most is None else min(most, len(losses))
    failed = ~np.isfinite(losses[:, 0])
    sorted_ones = np.flatnonzero(~failed)
    front_of = ranks(losses[sorted_ones])
    found: list[int] = []
    for front in range(int(front_of.max(initial=-1)) + 1):
        if len(found) >= count:
            break
        members = sorted_ones[front_of == front]
        found += [int(place) for place in members[epsilon_net(losses[members])]]
    return [*found, *np.flatnonzero(failed).tolist()][:count]


def epsilon_net(losses: Losses) -> list[int]:
    """Return the places of a front's vectors: the best by the first metric, then ever the farthest from those before.

    Distances are of metrics that are scaled to the front's range. Of equally far ones the first comes first.

    Args:
        losses: [n, metrics], of one front; some.
    """
    scaled = _scaled(losses)
    chosen = int(np.argmin(scaled[:, 0]))
    nearest = np.full(len(scaled), np.inf)
    found: list[int] = []
    for _ in range(len(scaled)):
        found.append(chosen)
        nearest = np.minimum(nearest, np.square(scaled - scaled[chosen]).sum(axis=1))
        nearest[chosen] = -1.0  # behind all that are left, equal ones too
        chosen = int(np.argmax(nearest))
    return found


def _scaled(losses: Losses) -> Losses:
    """Losses in units of their range; what is not finite is one range beyond it."""
    finite = np.where(np.isfinite(losses), losses, np.nan)
    known = np.isfinite(losses).any(axis=0)
    low, high = np.zeros(losses.shape[1]), np.ones(losses.shape[1])
    low[known], high[known] = np.nanmin(finite[:, known], axis=0), np.nanmax(finite[:, known], axis=0)
    width = np.where(high > low, high - low, 1.0)
    return np.nan_to_num((losses - low) / width, nan=2.0, posinf=2.0, neginf=-1.0)
