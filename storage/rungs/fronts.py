"""Pareto ranks, crowding distances and hypervolume, and the order of trials at a rung in multi-objective studies."""

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
    """Return values [n, metrics] as losses [n, metrics], for which lower is better; NaN becomes infinity.

    Args:
        values: values [n, metrics].
        maximize: per metric, whether higher values are better.
    """
    signs = np.where(np.asarray(maximize, dtype=bool), -1.0, 1.0)
    losses = np.asarray(values, dtype=float).reshape(-1, len(signs)) * signs
    return np.where(np.isnan(losses), np.inf, losses)


def compute_front_ranks(losses: Losses) -> NDArray[np.int64]:
    """Return the non-domination rank of each loss vector [n].

    The rank is 0 on the Pareto front, 1 on the front of the remaining vectors, and so on. Equal vectors have the same
    rank. The method is fast non-dominated sorting (Deb et al. 2002).
    """
    if not len(losses):
        return np.zeros(0, dtype=np.int64)
    if losses.shape[1] == 1:
        return np.unique(losses[:, 0], return_inverse=True)[1].astype(np.int64)
    import moocore  # takes a third of a second; single-objective studies do not need it

    return np.asarray(moocore.pareto_rank(losses), dtype=np.int64)


def find_front(losses: Losses) -> list[int]:
    """Return the indices of the loss vectors on the Pareto front."""
    return [int(index) for index in np.flatnonzero(compute_front_ranks(losses) == 0)]


def count_dominating(losses: Losses) -> NDArray[np.int64]:
    """Return, per loss vector, the number of vectors that dominate it: no worse in any metric, and better in one."""
    no_worse = (losses[:, None] <= losses[None]).all(axis=2)
    better = (losses[:, None] < losses[None]).any(axis=2)
    return np.asarray((no_worse & better).sum(axis=0), dtype=np.int64)


def compute_crowding_distances(losses: Losses) -> NDArray[np.float64]:
    """Return the crowding distance of each vector of one front (Deb et al. 2002).

    The distance is larger in sparse regions, and infinite at the ends of the front. Among equal vectors, only the first
    has this distance; the distance of the other ones is 0.
    """
    distances = np.zeros(len(losses))
    _, firsts = np.unique(losses, axis=0, return_index=True)
    for metric in losses[firsts].T:
        order = np.argsort(metric, kind="stable")
        ordered = metric[order]
        width = ordered[-1] - ordered[0]
        distances[firsts[order[[0, -1]]]] = np.inf
        if np.isfinite(width) and width > 0:
            distances[firsts[order[1:-1]]] += (ordered[2:] - ordered[:-2]) / width
    return distances


def sort_by_crowding(losses: Losses) -> list[int]:
    """Return the indices of loss vectors, sorted by front rank, then by descending crowding distance, then by index."""
    ranks, distances = compute_front_ranks(losses), np.zeros(len(losses))
    for rank in np.unique(ranks):
        members = np.flatnonzero(ranks == rank)
        distances[members] = compute_crowding_distances(losses[members])
    return [int(index) for index in np.lexsort((np.arange(len(losses)), -distances, ranks))]


def compute_hypervolume(losses: Losses, reference: Sequence[float]) -> float:
    """Return the hypervolume that loss vectors dominate up to a reference point.

    Args:
        losses: losses [n, metrics]; a vector that is not better than the reference in every metric is ignored.
        reference: losses [metrics] of the reference point.
    """
    within = losses[(losses < np.asarray(reference)).all(axis=1)]
    if not len(within):
        return 0.0
    import moocore  # slow, see above

    return float(moocore.hypervolume(within, ref=np.asarray(reference, dtype=float)))


def sort_by_front(losses: Losses, most: int | None = None) -> list[int]:
    """Return the indices of loss vectors, best first: by front rank, then in epsilon-net order, then by index.

    Args:
        losses: losses [n, metrics] of trials, the earliest trial first. An infinite first loss means that the trial has
            diverged; diverged trials come last.
        most: number of indices to return; None for all.
    """
    count = len(losses) if most is None else min(most, len(losses))
    diverged = ~np.isfinite(losses[:, 0])
    candidates = np.flatnonzero(~diverged)
    ranks = compute_front_ranks(losses[candidates])
    found: list[int] = []
    for rank in range(int(ranks.max(initial=-1)) + 1):
        if len(found) >= count:
            break
        members = candidates[ranks == rank]
        found += [int(index) for index in members[sort_by_epsilon_net(losses[members])]]
    return [*found, *np.flatnonzero(diverged).tolist()][:count]


def sort_by_epsilon_net(losses: Losses) -> list[int]:
    """Return the indices of a front's vectors in the order of an epsilon-net (MO-ASHA, Schmucker et al. 2021).

    The first vector is the best by the first metric. Each following vector has the largest distance to the vectors
    that were chosen before. Distances are computed with metrics scaled to the range of the front. Of equally distant
    vectors, the one with the lowest index is chosen.

    Args:
        losses: losses [n, metrics] of one front, n > 0.
    """
    scaled = _scale(losses)
    chosen = int(np.argmin(scaled[:, 0]))
    nearest = np.full(len(scaled), np.inf)
    found: list[int] = []
    for _ in range(len(scaled)):
        found.append(chosen)
        nearest = np.minimum(nearest, np.square(scaled - scaled[chosen]).sum(axis=1))
        nearest[chosen] = -1.0  # lower than the distance of any remaining vector, even of an equal one, which is 0
        chosen = int(np.argmax(nearest))
    return found


def _scale(losses: Losses) -> Losses:
    """Scale each metric's finite losses to [0, 1]; infinity and NaN become 2, and minus infinity becomes -1."""
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
    UPDATE hpsearch_rungs r SET loss = at.rank
      FROM unnest(CAST(:trials AS int[]), CAST(:ranks AS double precision[])) AS at (trial_id, rank)
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
    """Record the values of a trial at a rung, and recompute the ranks of all trials at this rung.

    Values that were recorded for the trial at this rung before are kept.

    Args:
        connection: connection whose transaction holds the lock of the study's row.
        study_id: id of the study.
        trial_id: id of the trial.
        maximize: per objective, whether higher values are better.
        rung: the reached rung, from 0.
        values: value of each objective, not NaN.
    """
    [losses] = to_losses([values], maximize).tolist()
    # An infinite rank, until the ranks are recomputed below.
    arguments = {"trial": trial_id, "rung": rung, "study": study_id, "loss": math.inf, "losses": losses}
    if connection.execute(INSERT_RUNG_VALUE, arguments).rowcount == 1:
        _rerank(connection, study_id, rung)


def rerank_all(connection: sa.Connection, study_id: int, maximize: Sequence[bool]) -> None:
    """Recompute the ranks at all rungs of a multi-objective study, after a trial was removed from its rungs.

    Args:
        connection: connection whose transaction holds the lock of the study's row.
        study_id: id of the study.
        maximize: per objective, whether higher values are better; empty in a single-objective study, which needs no
            ranks, so that nothing is done.
    """
    if maximize:
        for rung in connection.execute(_SELECT_RUNGS, {"study": study_id}).scalars().all():
            _rerank(connection, study_id, rung)


def _rerank(connection: sa.Connection, study_id: int, rung: int) -> None:
    rows = connection.execute(_SELECT_AT_RUNG, {"study": study_id, "rung": rung}).all()
    if not rows:
        return
    order = sort_by_front(to_losses([row.losses for row in rows], [False] * len(rows[0].losses)))
    changed = [(rows[i].trial_id, float(rank)) for rank, i in enumerate(order) if rows[i].loss != rank]
    if changed:
        trials, ranks = zip(*changed, strict=True)
        connection.execute(_UPDATE_RANKS, {"trials": list(trials), "ranks": list(ranks), "rung": rung})


def to_values(losses: Sequence[float], maximize: Sequence[bool]) -> list[float]:
    """Return the values of one loss vector; the inverse of `to_losses`."""
    return [-loss if flip else loss for loss, flip in zip(losses, maximize, strict=True)]
