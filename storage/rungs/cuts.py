"""Where the places at a rung end: kept as trials come to it, so that a promotion counts nobody.

Each rung has a row in ``hpsearch_rung_cuts``. It says how many have reached the rung, who is the worst among the best
one in `factor` of them, and who is the worst that may yet come to be among these, in the study's budget. A trial that
comes to the rung moves either by one place at most, to its neighbour in the index. Whoever writes a row holds the
study's.
"""

from __future__ import annotations

import sqlalchemy as sa

_OPEN = sa.text("""
    INSERT INTO hpsearch_rung_cuts (study_id, rung) VALUES (:study, :rung) ON CONFLICT (study_id, rung) DO NOTHING
""")

# After the trial's own row is there. One place more, unless the trial has taken one of those there were; or one less.
_MOVED = """
    (SELECT loss, trial_id FROM (
        SELECT {grown} - ((CAST(:loss AS double precision), :trial) < (c.{cut}_loss, c.{cut}_trial))::int AS by
        OFFSET 0) AS moves
       JOIN LATERAL (
        SELECT c.{cut}_loss AS loss, c.{cut}_trial AS trial_id WHERE moves.by = 0
        UNION ALL
        (SELECT o.loss, o.trial_id FROM hpsearch_rungs o
          WHERE moves.by = 1 AND o.study_id = c.study_id AND o.rung = c.rung
            AND (o.loss, o.trial_id) > (c.{cut}_loss, c.{cut}_trial)
          ORDER BY o.study_id, o.rung, o.loss, o.trial_id LIMIT 1)
        UNION ALL
        (SELECT o.loss, o.trial_id FROM hpsearch_rungs o
          WHERE moves.by = -1 AND o.study_id = c.study_id AND o.rung = c.rung
            AND (o.loss, o.trial_id) < (c.{cut}_loss, c.{cut}_trial)
          ORDER BY o.study_id DESC, o.rung DESC, o.loss DESC, o.trial_id DESC LIMIT 1)) AS place ON true)
"""
_ONE_IN = "(c.reached + 1) / :factor - c.reached / :factor"
_MOVE = sa.text(f"""
    UPDATE hpsearch_rung_cuts c
       SET reached = reached + 1,
           (best_loss, best_trial) = {_MOVED.format(cut="best", grown=_ONE_IN)},
           (last_loss, last_trial) = {_MOVED.format(cut="last", grown="(c.reached < :places)::int")}
     WHERE study_id = :study AND rung = :rung
""")  # noqa: S608 the parts are constants

_FORGET = sa.text("DELETE FROM hpsearch_rung_cuts WHERE study_id = :study")

_COUNT = sa.text("""
    INSERT INTO hpsearch_rung_cuts (study_id, rung, reached, best_loss, best_trial, last_loss, last_trial)
    SELECT :study, rung, reached, coalesce(b.loss, '-infinity'), coalesce(b.trial_id, 0),
           CASE WHEN :hopeless THEN coalesce(l.loss, '-infinity') ELSE 'infinity' END, coalesce(l.trial_id, 0)
      FROM (SELECT rung, count(*) AS reached FROM hpsearch_rungs WHERE study_id = :study GROUP BY rung) AS at
      LEFT JOIN LATERAL (
        SELECT loss, trial_id FROM hpsearch_rungs o WHERE o.study_id = :study AND o.rung = at.rung
         ORDER BY loss, trial_id OFFSET greatest(reached / :factor - 1, 0) LIMIT 1) AS b ON reached >= :factor
      LEFT JOIN LATERAL (
        SELECT loss, trial_id FROM hpsearch_rungs o WHERE o.study_id = :study AND o.rung = at.rung
         ORDER BY loss, trial_id OFFSET greatest(least(reached, :places) - 1, 0) LIMIT 1) AS l ON :places > 0
""")


def open_rung(connection: sa.Connection, study_id: int, rung: int) -> None:
    """Make a rung's row, once."""
    connection.execute(_OPEN, {"study": study_id, "rung": rung})


def move(
    connection: sa.Connection, study_id: int, rung: int, *, trial_id: int, loss: float, factor: int, places: int
) -> None:
    """Take a trial into account that has just come to a rung.

    Args:
        connection: in a transaction that holds the study's row.
        study_id: the study.
        rung: from 0; its row is there, and the trial's at it.
        trial_id: the trial.
        loss: its, at the rung.
        factor: of those that reach a rung, one in so many goes on.
        places: how many may go on from a rung, in the study's budget.
    """
    places_are = {"factor": factor, "places": places}
    connection.execute(_MOVE, {"study": study_id, "rung": rung, "trial": trial_id, "loss": loss, **places_are})


def count_anew(connection: sa.Connection, study_id: int, *, factor: int, places: int, hopeless: bool = True) -> None:
    """Find the cuts by counting: the budget is another, or a trial has left its rungs.

    Args:
        connection: in a transaction that holds the study's row.
        study_id: the study.
        factor: of those that reach a rung, one in so many goes on.
        places: how many may go on from a rung, in the study's budget.
        hopeless: whether those beyond the places will never go on; else any may yet.
    """
    connection.execute(_FORGET, {"study": study_id})
    arguments = {"study": study_id, "factor": factor, "places": places, "hopeless": hopeless}
    connection.execute(_COUNT, arguments)
