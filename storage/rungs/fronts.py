"""Where trials of several metrics stand at a rung: by their fronts (MO-ASHA, Schmucker et al. 2021).

What a trial comes to at a rung is kept as it is, in `losses`; the `loss` by which all other statements compare is its
place in the order of the fronts, and is written anew for all that have reached the rung when another comes.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from hpsearch.storage.pareto import losses_of
from hpsearch.storage.rungs.front_order import order

# Behind all others, until the places are given.
_NOTE = sa.text("""
    INSERT INTO hpsearch_rungs (trial_id, rung, study_id, loss, losses)
    VALUES (:trial, :rung, :study, 'infinity', CAST(:losses AS double precision[]))
    ON CONFLICT (trial_id, rung) DO NOTHING
""")

_AT = sa.text("""
    SELECT trial_id, losses, loss FROM hpsearch_rungs WHERE study_id = :study AND rung = :rung ORDER BY trial_id
""")

_PLACE = sa.text("""
    UPDATE hpsearch_rungs r SET loss = at.place
      FROM unnest(CAST(:trials AS int[]), CAST(:places AS double precision[])) AS at (trial_id, place)
     WHERE r.trial_id = at.trial_id AND r.rung = :rung
""")

_RUNGS = sa.text("SELECT DISTINCT rung FROM hpsearch_rungs WHERE study_id = :study")


def note(
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
    [losses] = losses_of([values], maximize).tolist()
    arguments = {"trial": trial_id, "rung": rung, "study": study_id, "losses": losses}
    if connection.execute(_NOTE, arguments).rowcount == 1:
        _place(connection, study_id, rung)


def place_all(connection: sa.Connection, study_id: int, maximize: Sequence[bool]) -> None:
    """Give all places anew, of a study of several metrics: a trial has left its rungs.

    Args:
        connection: in a transaction that holds the study's row.
        study_id: the study.
        maximize: of each of several metrics, whether higher is better; empty where there is one.
    """
    if maximize:
        for rung in connection.execute(_RUNGS, {"study": study_id}).scalars().all():
            _place(connection, study_id, rung)


def _place(connection: sa.Connection, study_id: int, rung: int) -> None:
    rows = connection.execute(_AT, {"study": study_id, "rung": rung}).all()
    if not rows:
        return
    ordered = order(losses_of([row.losses for row in rows], [False] * len(rows[0].losses)))
    moved = [(rows[at].trial_id, float(place)) for place, at in enumerate(ordered) if rows[at].loss != place]
    if moved:
        trials, places = zip(*moved, strict=True)
        connection.execute(_PLACE, {"trials": list(trials), "places": list(places), "rung": rung})


def values_of(losses: Sequence[float], maximize: Sequence[bool]) -> list[float]:
    """Return losses as the values that they were."""
    return [-loss if up else loss for loss, up in zip(losses, maximize, strict=True)]
