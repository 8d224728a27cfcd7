"""Rungs: record values of trials, promote the best paused trials, and prune trials that cannot be promoted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from hpsearch.storage.database.statements import Database
from hpsearch.storage.rungs import fronts


@dataclass(frozen=True)
class Rungs:
    """The rungs of a study.

    Attributes:
        pruner: name of the pruner.
        epochs: per rung, the number of epochs after which a trial reaches the rung.
        max_epochs: number of epochs of a full trial.
        factor: reduction factor; one in `factor` trials at a rung is promoted.
        maximize: whether higher values of the metric are better; of the first metric in a multi-objective study.
        min_complete: minimum number of trials that train to completion.
        maximize_each: per objective of a multi-objective study, whether higher values are better; empty in a
            single-objective study.
        decide: for population-based training, the function that decides at the end of each generation, for which the
            other rules do not apply; None for other pruners.
    """

    pruner: str
    epochs: tuple[int, ...]
    max_epochs: int
    factor: int
    maximize: bool
    min_complete: int = 1
    maximize_each: tuple[bool, ...] = ()
    decide: Callable[[int, Sequence[Any]], Sequence[Any]] | None = None

    def to_loss(self, value: float) -> float:
        """Return a value as a loss, for which lower is better."""
        return -value if self.maximize else value

    to_value = to_loss  # the inverse

    def get_promotion_quota(self, n_trials: int) -> int:
        """Return the maximum number of trials that can be promoted at a rung, given the budget in trials."""
        return max(self.min_complete, n_trials // self.factor)


@dataclass(frozen=True)
class RungRank:
    """Rank of a trial at a rung.

    Attributes:
        rung: the rung, from 0.
        rank: rank, from 1, among all trials that have reached the rung, in any state.
        reached_count: number of trials that have reached the rung.
        is_promoted: whether the trial is promoted, so that it continues.
    """

    rung: int
    rank: int
    reached_count: int
    is_promoted: bool


@dataclass(frozen=True)
class RungCounts:
    """Numbers of trials that have reached a rung, were promoted at it, wait at it, and were pruned at it."""

    rung: int
    reached: int
    promoted: int
    waiting: int
    pruned: int


@dataclass(frozen=True)
class PrunedTrial:
    """A waiting trial that was set to PRUNED, because it cannot continue.

    Attributes:
        trial_id, number: id and number of the trial.
        attempt: number of the trial's last attempt.
        reason: reason of the pruning, as text for users.
        decision: fields of the pruner's `Decision`; empty if the trial was pruned because the budget was spent.
        is_out_of_budget: whether the budget was spent while the trial ran; if the budget grows, the trial resumes.
    """

    trial_id: int
    number: int
    attempt: int
    reason: str
    decision: dict[str, Any]
    is_out_of_budget: bool = False


# Only for messages; no decision uses it.
_COUNT_BETTER = """
    (SELECT count(*) FROM hpsearch_rungs o
      WHERE o.study_id = r.study_id AND o.rung = r.rung AND (o.loss, o.trial_id) < (r.loss, r.trial_id))
"""

_SELECT_RANK = sa.text(f"""
    SELECT r.promoted_at IS NOT NULL AS promoted, (r.loss, r.trial_id) <= (c.best_loss, c.best_trial) AS is_best,
           {_COUNT_BETTER} AS better, coalesce(c.reached, (
             SELECT count(*) FROM hpsearch_rungs o WHERE o.study_id = r.study_id AND o.rung = r.rung)) AS reached
      FROM hpsearch_rungs r LEFT JOIN hpsearch_rung_cuts c USING (study_id, rung)
     WHERE r.trial_id = :trial AND r.rung = :rung
""")  # noqa: S608 the parts are constants

_SELECT_COUNTS = sa.text("""
    SELECT rung, count(*) AS reached, count(promoted_at) AS promoted,
           count(*) FILTER (WHERE promoted_at IS NULL AND t.state = 'WAITING') AS waiting,
           count(*) FILTER (WHERE promoted_at IS NULL AND t.state = 'PRUNED') AS pruned
      FROM hpsearch_rungs r JOIN trials t USING (trial_id) WHERE r.study_id = :study GROUP BY rung ORDER BY rung
""")

_HAS_WAITING = sa.text("""
    SELECT EXISTS (SELECT FROM hpsearch_rungs r JOIN trials t USING (trial_id)
                    WHERE r.study_id = :study AND r.promoted_at IS NULL AND r.retired_at IS NULL
                      AND t.state = 'WAITING')
""")

_UPDATE_PROMOTED = sa.text("""
    UPDATE hpsearch_rungs SET promoted_at = clock_timestamp()
     WHERE trial_id = :trial AND rung = :rung AND promoted_at IS NULL
""")

# The index of this query contains only trials that are neither promoted nor pruned.
_JOIN_WAITING = """
    JOIN LATERAL (
        SELECT r.trial_id, r.study_id, r.rung, r.loss, r.losses, t.number
          FROM hpsearch_rungs r JOIN trials t USING (trial_id)
         WHERE r.study_id = c.study_id AND r.rung = c.rung AND r.promoted_at IS NULL AND r.retired_at IS NULL
           AND t.state = 'WAITING'
         ORDER BY r.study_id {order}, r.rung {order}, r.loss {order}, r.trial_id {order} LIMIT 1) r
"""

# The highest rung with a trial to promote.
_SELECT_PROMOTABLE = sa.text(f"""
    SELECT r.trial_id, r.rung
      FROM hpsearch_rung_cuts c {_JOIN_WAITING.format(order="")} ON (r.loss, r.trial_id) <= (c.best_loss, c.best_trial)
     WHERE c.study_id = :study ORDER BY c.rung DESC LIMIT 1
""")  # noqa: S608 the parts are constants

# The number of COMPLETE trials, counted up to `min_complete`.
_COUNT_COMPLETE = """
    (SELECT count(*) FROM (
        SELECT FROM trials e WHERE e.study_id = :study AND e.state = 'COMPLETE' LIMIT :complete) AS e)
"""

# Only while the COMPLETE and running trials are fewer than `min_complete`.
_SELECT_TO_COMPLETE = sa.text(f"""
    SELECT r.trial_id, r.rung FROM hpsearch_rung_cuts c {_JOIN_WAITING.format(order="")} ON true
     WHERE c.study_id = :study AND :running + {_COUNT_COMPLETE} < :complete
     ORDER BY c.rung DESC LIMIT 1
""")  # noqa: S608 the parts are constants

# Until `min_complete` trials are COMPLETE, all waiting trials are kept, because better ones may diverge or fail.
_SELECT_TO_PRUNE = sa.text(f"""
    SELECT r.*, {_COUNT_BETTER} AS better,
           (SELECT max(attempt) FROM hpsearch_attempts a WHERE a.trial_id = r.trial_id) AS attempt
      FROM (
        SELECT r.*, c.reached,
               CASE WHEN :over THEN greatest(c.reached / :factor, few.promoted) ELSE :places END AS places,
               CASE WHEN :over THEN coalesce(few.loss, c.best_loss) ELSE c.last_loss END AS cutoff
          FROM hpsearch_rung_cuts c {_JOIN_WAITING.format(order="DESC")}
            ON :over OR (r.loss, r.trial_id) > (c.last_loss, c.last_trial)
          LEFT JOIN LATERAL (
            SELECT count(*) AS promoted, max(loss) AS loss FROM hpsearch_rungs p
             WHERE c.reached < :factor * :complete
               AND p.study_id = c.study_id AND p.rung = c.rung AND p.promoted_at IS NOT NULL
            ) AS few ON true
         WHERE c.study_id = :study AND (:over OR {_COUNT_COMPLETE} >= :complete) ORDER BY c.rung LIMIT 1) AS r
""")  # noqa: S608 the parts are constants

# Only trials that wait at rungs have a start, so the first condition skips these thousands of rows.
EXCEPT_PAUSED = """
    AND datetime_start IS NULL
    AND NOT EXISTS (SELECT FROM hpsearch_rungs r WHERE r.trial_id = t.trial_id AND r.promoted_at IS NULL)
"""


def read_rung_counts(engine: sa.Engine, study_id: int) -> list[RungCounts]:
    """Return the counts of each rung that at least one trial has reached, the lowest rung first."""
    return [RungCounts(**row._mapping) for row in Database(engine).fetch_rows(_SELECT_COUNTS, {"study": study_id})]


def record_rung_value(
    connection: sa.Connection,
    study_id: int,
    trial_id: int,
    rungs: Rungs,
    *,
    rung: int,
    value: float | Sequence[float],
    n_trials: int,
) -> None:
    """Record the value of a trial at a rung; a value that was recorded before is kept.

    Args:
        connection: connection whose transaction holds the lock of the study's row.
        study_id: id of the study.
        trial_id: id of the trial.
        rungs: rungs of the study.
        rung: the reached rung, from 0.
        value: best value up to the rung; in a multi-objective study, the values of all objectives at the best epoch.
        n_trials: the budget in trials.
    """
    if not isinstance(value, float):
        fronts.record_rung_values(connection, study_id, trial_id, rungs.maximize_each, rung=rung, values=value)
        recompute_cutoffs(connection, study_id, rungs, n_trials=n_trials)
        return
    has_cutoffs = rungs.decide is None
    if has_cutoffs:
        connection.execute(_INSERT_CUTOFFS, {"study": study_id, "rung": rung})
    arguments = {"trial": trial_id, "rung": rung, "study": study_id, "loss": rungs.to_loss(value)}
    if connection.execute(fronts.INSERT_RUNG_VALUE, {**arguments, "losses": None}).rowcount == 1 and has_cutoffs:
        places = rungs.get_promotion_quota(n_trials)
        connection.execute(_UPDATE_CUTOFFS, {**arguments, "factor": rungs.factor, "places": places})


def recompute_cutoffs(connection: sa.Connection, study_id: int, rungs: Rungs, *, n_trials: int) -> None:
    """Recompute the cutoffs of all rungs, after a change of the budget or after a trial has been removed from rungs.

    Args:
        connection: connection whose transaction holds the lock of the study's row.
        study_id: id of the study.
        rungs: rungs of the study.
        n_trials: the budget in trials.
    """
    connection.execute(_DELETE_CUTOFFS, {"study": study_id})
    if rungs.decide is not None:
        return  # a generation has no cutoff
    arguments = {"study": study_id, "factor": rungs.factor, "places": rungs.get_promotion_quota(n_trials)}
    # In multi-objective studies, any trial may still be promoted: a later trial may change the ranks of earlier trials.
    connection.execute(_RECOMPUTE_CUTOFFS, {**arguments, "hopeless": not rungs.maximize_each})


def read_rung_rank(connection: sa.Connection, trial_id: int, rungs: Rungs, rung: int) -> RungRank:
    """Return the rank of a trial at a rung that it has reached, and whether it is promoted.

    In population-based training, only a member that has continued before is promoted, so that it does not pause again.
    """
    row = connection.execute(_SELECT_RANK, {"trial": trial_id, "rung": rung}).one()
    return RungRank(rung, row.better + 1, row.reached, row.promoted or (rungs.decide is None and row.is_best))


def has_waiting_trials(connection: sa.Connection, study_id: int) -> bool:
    """Return whether a trial waits at a rung, at which it must be promoted or pruned."""
    return bool(connection.execute(_HAS_WAITING, {"study": study_id}).scalar_one())


def find_next_to_promote(connection: sa.Connection, study_id: int) -> tuple[int, int] | None:
    """Return (id, rung) of the next trial to promote; None if no trial can be promoted."""
    row = connection.execute(_SELECT_PROMOTABLE, {"study": study_id}).one_or_none()
    return None if row is None else (row.trial_id, row.rung)


def find_next_to_complete(
    connection: sa.Connection, study_id: int, rungs: Rungs, *, running: int
) -> tuple[int, int] | None:
    """Return (id, rung) of the best trial that waits at the highest rung, if fewer than `min_complete` are complete.

    It returns None if enough trials are complete, or no trial waits. The number of running trials, `running`, counts
    as complete.
    """
    arguments = {"study": study_id, "running": running, "complete": rungs.min_complete}
    row = connection.execute(_SELECT_TO_COMPLETE, arguments).one_or_none()
    return None if row is None else (row.trial_id, row.rung)


def record_promotion(connection: sa.Connection, trial_id: int, rung: int | None) -> None:
    """Record that a trial is promoted at a rung, unless `rung` is None; the time of an earlier record is kept."""
    if rung is not None:
        connection.execute(_UPDATE_PROMOTED, {"trial": trial_id, "rung": rung})


def find_next_to_prune(
    connection: sa.Connection, study_id: int, rungs: Rungs, *, n_trials: int, over: bool, why: str = "timeout reached"
) -> PrunedTrial | None:
    """Return the worst trial that waits at a rung and cannot be promoted any more; None if there is no such trial.

    Before `min_complete` trials are complete, there is no such trial unless `over` is true.

    Args:
        connection: connection whose transaction holds the lock of the study's row.
        study_id: id of the study.
        rungs: rungs of the study.
        n_trials: the budget in trials.
        over: whether no trial will reach a rung any more, so that all waiting trials are pruned.
        why: reason why no trial will reach a rung, for the message.
    """
    arguments = {
        "study": study_id,
        "factor": rungs.factor,
        "complete": rungs.min_complete,
        "places": rungs.get_promotion_quota(n_trials),
        "over": over,
    }
    row = connection.execute(_SELECT_TO_PRUNE, arguments).one_or_none()
    if row is None:
        return None
    epochs = rungs.epochs[row.rung]
    if not over:
        verdict = f"{row.places} of {n_trials} trials are promoted"
    elif row.better < row.places:
        verdict = why
    else:
        ranks = "rank 1 is" if row.places == 1 else f"ranks 1 to {row.places} are"
        verdict = f"{ranks} promoted" if row.places else "none promoted"
    by_fronts = " by Pareto fronts" if rungs.maximize_each else ""
    if rungs.maximize_each and row.places:  # the ranks may have differed when other trials were promoted
        counts = connection.execute(_SELECT_COUNTS, {"study": study_id})
        promoted = sum(at.promoted for at in counts if at.rung == row.rung)
        verdict = f"{promoted} promoted by earlier ranks" if promoted else "none promoted"
    reason = (
        f"{rungs.pruner} pruner at epoch {epochs} of {rungs.max_epochs}: rank {row.better + 1} of {row.reached}"
        f"{by_fronts} at rung {row.rung}, {verdict}"
    )
    if rungs.maximize_each:
        compared = {"value": fronts.to_values(row.losses, rungs.maximize_each)[0]}
    else:
        cutoff = {"cutoff": rungs.to_value(row.cutoff)} if row.places else {}
        compared = {"value": rungs.to_value(row.loss), **cutoff}
    decision = {"pruner": rungs.pruner, "epoch": epochs - 1, **compared, "peers": row.reached - 1, "rung": row.rung}
    return PrunedTrial(row.trial_id, row.number, row.attempt, reason, decision)


_INSERT_CUTOFFS = sa.text("""
    INSERT INTO hpsearch_rung_cuts (study_id, rung) VALUES (:study, :rung) ON CONFLICT (study_id, rung) DO NOTHING
""")

# Runs after the insert of the trial's row. A cutoff moves up or down by one rank, or stays.
_NEW_CUTOFF = """
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
_BEST_GROWTH = "(c.reached + 1) / :factor - c.reached / :factor"
_UPDATE_CUTOFFS = sa.text(f"""
    UPDATE hpsearch_rung_cuts c
       SET reached = reached + 1,
           (best_loss, best_trial) = {_NEW_CUTOFF.format(cut="best", grown=_BEST_GROWTH)},
           (last_loss, last_trial) = {_NEW_CUTOFF.format(cut="last", grown="(c.reached < :places)::int")}
     WHERE study_id = :study AND rung = :rung
""")  # noqa: S608 the parts are constants

_DELETE_CUTOFFS = sa.text("DELETE FROM hpsearch_rung_cuts WHERE study_id = :study")

_RECOMPUTE_CUTOFFS = sa.text("""
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
