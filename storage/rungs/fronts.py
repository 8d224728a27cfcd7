"""Pareto ranks, crowding and hypervolume, and the order of trials at a rung with several objectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import sqlalchemy as sa

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Losses = NDArray[np.float64]


def to_losses(values: Sequence[Sequence[float]], maximize: Sequence[bool]) -> Losses:
    """Return values [n, metrics] as losses, whatever of them is better when it is higher.

    A NaN is as bad as can be.
    """
    signs = np.where(np.asarray(maximize, dtype=bool), -1.0, 1.0)
    losses = np.asarray(values, dtype=float).reshape(-1, len(signs)) * signs
    return np.where(np.isnan(losses), np.inf, losses)


def compute_front_ranks(losses: Losses) -> NDArray[np.int64]:
    """Return the front that each vector is in, from 0: that of those which none dominates, then of the rest, and so on.

    Fast non-dominated sorting (Deb et al. 2002); equal vectors are in the same front.
    """
    if not len(losses):
        return np.zeros(0, dtype=np.int64)
    if losses.shape[1] == 1:
        return np.unique(losses[:, 0], return_inverse=True)[1].astype(np.int64)
    import moocore  # a third of a second, which studies of one metric need not spend

    return np.asarray(moocore.pareto_rank(losses), dtype=np.int64)


def find_front(losses: Losses) -> list[int]:
    """Return the places of the vectors that none dominates."""
    return [int(place) for place in np.flatnonzero(compute_front_ranks(losses) == 0)]


def count_dominating(losses: Losses) -> NDArray[np.int64]:
    """Return by how many others each vector is dominated: no worse in any metric, better in one."""
    no_worse = (losses[:, None] <= losses[None]).all(axis=2)
    better = (losses[:, None] < losses[None]).any(axis=2)
    return np.asarray((no_worse & better).sum(axis=0), dtype=np.int64)


def compute_crowding_distances(losses: Losses) -> NDArray[np.float64]:
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


def sort_by_crowding(losses: Losses) -> list[int]:
    """Return the places of the vectors in order: by their front, within one by crowding distance, then by place."""
    rank, room = compute_front_ranks(losses), np.zeros(len(losses))
    for each in np.unique(rank):
        members = np.flatnonzero(rank == each)
        room[members] = compute_crowding_distances(losses[members])
    return [int(place) for place in np.lexsort((np.arange(len(losses)), -room, rank))]


def compute_hypervolume(losses: Losses, reference: Sequence[float]) -> float:
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


def sort_by_front(losses: Losses, most: int | None = None) -> list[int]:
    """Return the places of the vectors, the best first: by front, within one by how they spread, then by place.

    Args:
        losses: [n, metrics], lower is better; in the order of the trials, the earliest first. A trial whose first
            metric is infinite has failed, and comes after all others, however good it is otherwise.
        most: how many are asked for; None for all.
    """
    count = len(losses) if most is None else min(most, len(losses))
    failed = ~np.isfinite(losses[:, 0])
    sorted_ones = np.flatnonzero(~failed)
    front_of = compute_front_ranks(losses[sorted_ones])
    found: list[int] = []
    for find_front in range(int(front_of.max(initial=-1)) + 1):
        if len(found) >= count:
            break
        members = sorted_ones[front_of == find_front]
        found += [int(place) for place in members[sort_by_epsilon_net(losses[members])]]
    return [*found, *np.flatnonzero(failed).tolist()][:count]


def sort_by_epsilon_net(losses: Losses) -> list[int]:
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


INSERT_RUNG_VALUE = sa.text("""
    INSERT INTO hpsearch_rungs (trial_id, rung, study_id, loss, losses)
    VALUES (:trial, :rung, :study, :loss, CAST(:losses AS double precision[]))
    ON CONFLICT (trial_id, rung) DO NOTHING
""")

_SELECT_AT_RUNG = sa.text("""
    SELECT trial_id, losses, loss FROM hpsearch_rungs WHERE study_id = :study AND rung = :rung ORDER BY trial_id
""")

_UPDATE_RANKS = sa.text("""
    UPDATE hpsearch_rungs r SET loss = at.place
      FROM unnest(CAST(:trials AS int[]), CAST(:places AS double precision[])) AS at (trial_id, place)
     WHERE r.trial_id = at.trial_id AND r.rung = :rung
""")

_SELECT_RUNGS = sa.text("SELECT DISTINCT rung FROM hpsearch_rungs WHERE study_id = :study")


def record_rung_values(
    connection: sa.Connection,
    study_id: int,
    trial_id: int,
    maximize: Sequence[bool],
    *,
    rung: int,
    values: Sequence[float],
) -> None:
    """Note what a trial comes to at a rung, once, and give all that have reached it their places.

    Args:
        connection: in a transaction that holds the study's row.
        study_id: the study.
        trial_id: the trial.
        maximize: of each metric, whether higher is better.
        rung: from 0.
        values: of all metrics; none is NaN.
    """
    [losses] = to_losses([values], maximize).tolist()
    # Behind all others, until the places are given.
    arguments = {"trial": trial_id, "rung": rung, "study": study_id, "loss": math.inf, "losses": losses}
    if connection.execute(INSERT_RUNG_VALUE, arguments).rowcount == 1:
        _rerank(connection, study_id, rung)


def rerank_all(connection: sa.Connection, study_id: int, maximize: Sequence[bool]) -> None:
    """Give all places anew, of a study of several metrics: a trial has left its rungs.

    Args:
        connection: in a transaction that holds the study's row.
        study_id: the study.
        maximize: of each of several metrics, whether higher is better; empty where there is one.
    """
    if maximize:
        for rung in connection.execute(_SELECT_RUNGS, {"study": study_id}).scalars().all():
            _rerank(connection, study_id, rung)


def _rerank(connection: sa.Connection, study_id: int, rung: int) -> None:
    rows = connection.execute(_SELECT_AT_RUNG, {"study": study_id, "rung": rung}).all()
    if not rows:
        return
    ordered = sort_by_front(to_losses([row.losses for row in rows], [False] * len(rows[0].losses)))
    moved = [(rows[at].trial_id, float(place)) for place, at in enumerate(ordered) if rows[at].loss != place]
    if moved:
        trials, places = zip(*moved, strict=True)
        connection.execute(_UPDATE_RANKS, {"trials": list(trials), "places": list(places), "rung": rung})


def to_values(losses: Sequence[float], maximize: Sequence[bool]) -> list[float]:
    """Return losses as the values that they were."""
    return [-loss if up else loss for loss, up in zip(losses, maximize, strict=True)]
