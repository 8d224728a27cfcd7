"""Rungs: record a trial's value and promote the best paused trial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from hpsearch.storage.database.statements import Database
from hpsearch.storage.rungs import fronts


@dataclass(frozen=True)
class Rungs:
    """The rungs of a study.

    Attributes:
        pruner: its name, for a person.
        epochs: how many epochs a trial has when it reaches each rung.
        total: epochs of a full trial.
        factor: of those that reach a rung, one in so many goes on.
        maximize: whether higher values are better; of several metrics, of the first.
        complete: how many trials are trained to their end at least.
        several: of each of several metrics whether higher is better; empty where there is one.
    """

    pruner: str
    epochs: tuple[int, ...]
    total: int
    factor: int
    maximize: bool
    complete: int = 1
    several: tuple[bool, ...] = ()

    def loss(self, value: float) -> float:
        """A value as it is compared: lower is better."""
        return -value if self.maximize else value

    value = loss  # and back

    def places(self, n_trials: int) -> int:
        """How many may go on from a rung, whichever: of trials that come the better the later, all do."""
        return max(self.complete, n_trials // self.factor)


@dataclass(frozen=True)
class Standing:
    """Where a trial stands at a rung.

    Attributes:
        rung: from 0.
        rank: from 1, among all that have reached it, in whatever state they are now.
        reached: how many have.
        promoted: whether it goes on.
    """

    rung: int
    rank: int
    reached: int
    promoted: bool


@dataclass(frozen=True)
class Occupancy:
    """How many trials have reached a rung, went on from it, wait there, and were pruned there."""

    rung: int
    reached: int
    promoted: int
    waiting: int
    pruned: int


@dataclass(frozen=True)
class Retired:
    """A waiting trial that was settled as PRUNED just now, because it will never go on.

    Attributes:
        trial_id, number: the trial's.
        attempt: its last.
        reason: in one line for a person.
        grounds: the same as numbers, by the names of a pruner's decision; none where it was cut.
        cut: whether it ran when the budget was spent, and goes on where that grows.
    """

    trial_id: int
    number: int
    attempt: int
    reason: str
    grounds: dict[str, Any]
    cut: bool = False


# For a person to read: no decision needs it.
_BETTER = """
    (SELECT count(*) FROM hpsearch_rungs o
      WHERE o.study_id = r.study_id AND o.rung = r.rung AND (o.loss, o.trial_id) < (r.loss, r.trial_id))
"""

_STANDING = sa.text(f"""
    SELECT r.promoted_at IS NOT NULL OR (r.loss, r.trial_id) <= (c.best_loss, c.best_trial) AS promoted,
           {_BETTER} AS better, c.reached
      FROM hpsearch_rungs r JOIN hpsearch_rung_cuts c USING (study_id, rung)
     WHERE r.trial_id = :trial AND r.rung = :rung
""")  # noqa: S608 the parts are constants

_OCCUPANCY = sa.text("""
    SELECT rung, count(*) AS reached, count(promoted_at) AS promoted,
           count(*) FILTER (WHERE promoted_at IS NULL AND t.state = 'WAITING') AS waiting,
           count(*) FILTER (WHERE promoted_at IS NULL AND t.state = 'PRUNED') AS pruned
      FROM hpsearch_rungs r JOIN trials t USING (trial_id) WHERE r.study_id = :study GROUP BY rung ORDER BY rung
""")

_PROMOTE = sa.text("""
    UPDATE hpsearch_rungs SET promoted_at = clock_timestamp()
     WHERE trial_id = :trial AND rung = :rung AND promoted_at IS NULL
""")

# Found in an index: who waits there, but for one that was ended from outside, goes on sooner or later or is retired.
_WAITING_AT = """
    JOIN LATERAL (
        SELECT r.trial_id, r.study_id, r.rung, r.loss, r.losses, t.number
          FROM hpsearch_rungs r JOIN trials t USING (trial_id)
         WHERE r.study_id = c.study_id AND r.rung = c.rung AND r.promoted_at IS NULL AND r.retired_at IS NULL
           AND t.state = 'WAITING'
         ORDER BY r.study_id {order}, r.rung {order}, r.loss {order}, r.trial_id {order} LIMIT 1) r
"""

# From the highest rung that has one.
_NEXT = sa.text(f"""
    SELECT r.trial_id, r.rung
      FROM hpsearch_rung_cuts c {_WAITING_AT.format(order="")} ON (r.loss, r.trial_id) <= (c.best_loss, c.best_trial)
     WHERE c.study_id = :study ORDER BY c.rung DESC LIMIT 1
""")  # noqa: S608 the parts are constants

# While fewer trials have come to their end, or may by running now, than are to.
_TO_THE_END = sa.text(f"""
    SELECT r.trial_id, r.rung FROM hpsearch_rung_cuts c {_WAITING_AT.format(order="")} ON true
     WHERE c.study_id = :study
       AND :running + (SELECT count(*) FROM (
             SELECT FROM trials e WHERE e.study_id = :study AND e.state = 'COMPLETE' LIMIT :complete) AS e) < :complete
     ORDER BY c.rung DESC LIMIT 1
""")  # noqa: S608 the parts are constants

_LAST = sa.text(f"""
    SELECT r.*, {_BETTER} AS better,
           (SELECT max(attempt) FROM hpsearch_attempts a WHERE a.trial_id = r.trial_id) AS attempt
      FROM (
        SELECT r.*, c.reached,
               CASE WHEN :over THEN greatest(c.reached / :factor, few.promoted) ELSE :places END AS places,
               CASE WHEN :over THEN coalesce(few.loss, c.best_loss) ELSE c.last_loss END AS cutoff
          FROM hpsearch_rung_cuts c {_WAITING_AT.format(order="DESC")}
            ON :over OR (r.loss, r.trial_id) > (c.last_loss, c.last_trial)
          LEFT JOIN LATERAL (
            SELECT count(*) AS promoted, max(loss) AS loss FROM hpsearch_rungs p
             WHERE c.reached < :factor * :complete
               AND p.study_id = c.study_id AND p.rung = c.rung AND p.promoted_at IS NOT NULL
            ) AS few ON true
         WHERE c.study_id = :study ORDER BY c.rung LIMIT 1) AS r
""")  # noqa: S608 the parts are constants

# Who waits to be taken has no start, but at a rung: so that those thousands need not be looked at.
BUT_PAUSED = """
    AND datetime_start IS NULL
    AND NOT EXISTS (SELECT FROM hpsearch_rungs r WHERE r.trial_id = t.trial_id AND r.promoted_at IS NULL)
"""


def read_rungs(engine: sa.Engine, study_id: int) -> list[Occupancy]:
    """Return the rungs of a study that a trial has reached, the lowest first."""
    return [Occupancy(**row._mapping) for row in Database(engine).rows(_OCCUPANCY, {"study": study_id})]


def note(
    connection: sa.Connection,
    study_id: int,
    trial_id: int,
    rungs: Rungs,
    *,
    rung: int,
    value: float | Sequence[float],
    n_trials: int,
) -> None:
    """Note a trial's value at a rung, once.

    Args:
        connection: in a transaction that holds the study's row.
        study_id: the study.
        trial_id: the trial.
        rungs: of the study.
        rung: that it has reached, from 0.
        value: its best up to there; of several metrics all of its best epoch.
        n_trials: the study's budget.
    """
    if not isinstance(value, float):
        fronts.note(connection, study_id, trial_id, rungs.several, rung=rung, values=value)
        count_places(connection, study_id, rungs, n_trials=n_trials)
        return
    connection.execute(_OPEN, {"study": study_id, "rung": rung})
    arguments = {"trial": trial_id, "rung": rung, "study": study_id, "loss": rungs.loss(value)}
    if connection.execute(fronts.NOTE, {**arguments, "losses": None}).rowcount == 1:
        connection.execute(_MOVE, {**arguments, "factor": rungs.factor, "places": rungs.places(n_trials)})


def count_places(connection: sa.Connection, study_id: int, rungs: Rungs, *, n_trials: int) -> None:
    """Find where the places at all rungs end by counting: the budget is another, or a trial has left its rungs.

    Args:
        connection: in a transaction that holds the study's row.
        study_id: the study.
        rungs: of the study.
        n_trials: its budget.
    """
    connection.execute(_FORGET, {"study": study_id})
    arguments = {"study": study_id, "factor": rungs.factor, "places": rungs.places(n_trials)}
    # With several metrics no trial waits in vain before the end: a later trial may push back those before it.
    connection.execute(_COUNT, {**arguments, "hopeless": not rungs.several})


def standing(connection: sa.Connection, trial_id: int, rung: int) -> Standing:
    """Return where a trial stands at a rung that it has reached, and whether it may go on from there."""
    row = connection.execute(_STANDING, {"trial": trial_id, "rung": rung}).one()
    return Standing(rung, row.better + 1, row.reached, row.promoted)


def next_promoted(connection: sa.Connection, study_id: int) -> tuple[int, int] | None:
    """Return the waiting trial that is to go on, and from which rung; None where there is none."""
    row = connection.execute(_NEXT, {"study": study_id}).one_or_none()
    return None if row is None else (row.trial_id, row.rung)


def next_to_the_end(connection: sa.Connection, study_id: int, rungs: Rungs, *, running: int) -> tuple[int, int] | None:
    """Return the best waiting trial of the highest rung, and that rung, while the study has too few complete trials.

    For when all were begun and nobody may go on from a rung: too few have reached it, and the study is to have so many
    trials of full length all the same. Each of the `running` ones may yet be one of them.
    """
    arguments = {"study": study_id, "running": running, "complete": rungs.complete}
    row = connection.execute(_TO_THE_END, arguments).one_or_none()
    return None if row is None else (row.trial_id, row.rung)


def promote(connection: sa.Connection, trial_id: int, rung: int) -> None:
    """Note that a trial goes on from a rung, once."""
    connection.execute(_PROMOTE, {"trial": trial_id, "rung": rung})


def next_retired(
    connection: sa.Connection, study_id: int, rungs: Rungs, *, n_trials: int, over: bool, why: str = "the time was up"
) -> Retired | None:
    """Return the worst waiting trial that will never go on, where there is one.

    Args:
        connection: in a transaction that holds the study's row.
        study_id: the study.
        rungs: of the study.
        n_trials: its budget.
        over: whether nothing will reach a rung any more, so that all who wait have waited in vain.
        why: nothing will.
    """
    arguments = {
        "study": study_id,
        "factor": rungs.factor,
        "complete": rungs.complete,
        "places": rungs.places(n_trials),
        "over": over,
    }
    row = connection.execute(_LAST, arguments).one_or_none()
    if row is None:
        return None
    epochs = rungs.epochs[row.rung]
    if not over:
        on = f"where the best {row.places} of {n_trials} trials go on"
    elif row.better < row.places:
        on = f"and {why}"
    else:
        on = f"where the best {row.places} went on" if row.places else "where none went on"
    by_fronts = " by fronts" if rungs.several else ""
    if rungs.several and row.places:  # the order may have been another when they went on
        occupied = connection.execute(_OCCUPANCY, {"study": study_id})
        went = sum(at.promoted for at in occupied if at.rung == row.rung)
        on = f"where {went} went on by the order of their time" if went else "where none went on"
    reason = (
        f"{rungs.pruner} pruner at epoch {epochs} of {rungs.total}: rank {row.better + 1} of {row.reached}{by_fronts} "
        f"at rung {row.rung}, {on}"
    )
    if rungs.several:
        compared = {"value": fronts.values_of(row.losses, rungs.several)[0]}
    else:
        cutoff = {"cutoff": rungs.value(row.cutoff)} if row.places else {}
        compared = {"value": rungs.value(row.loss), **cutoff}
    grounds = {
        "pruner": rungs.pruner,
        "epoch": epochs - 1,
        **compared,
        "peers": row.reached - 1,
        "rung": row.rung,
    }
    return Retired(row.trial_id, row.number, row.attempt, reason, grounds)


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
