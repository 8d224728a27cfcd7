"""A trial that failed is made claimable again: the same trial, from its last checkpoint or from its beginning.

Optuna's storages let no trial leave a finished state, so that this is a statement of our own. So are those that waited
at a rung in vain, when the budget grows.
"""

from __future__ import annotations

import sqlalchemy as sa

from storage.attributes import INFEASIBLE, PRUNING, REASON, TRACKING

# The steps that its last checkpoint has stay reported; the others are run, and reported, again. Attempts that came to
# nothing are marked, so that they no longer count against the trial's retries. One that is live, at a trial that was
# failed from outside, is ended: its worker has not noticed yet.
_REOPEN = sa.text("""
    WITH mine AS (
        UPDATE trials t SET state = 'WAITING', datetime_complete = NULL
         WHERE trial_id = :trial
           AND (state = 'FAIL' OR state = 'PRUNED' AND EXISTS (
                SELECT FROM trial_user_attributes a
                 WHERE a.trial_id = t.trial_id AND a.key = :infeasible AND a.value_json = 'true'))
        RETURNING trial_id
    ), resumed AS (
        SELECT max(epoch) AS epoch FROM hpsearch_checkpoints JOIN mine USING (trial_id) WHERE NOT :from_start
    ), steps AS (
        DELETE FROM trial_intermediate_values v USING mine, resumed
         WHERE v.trial_id = mine.trial_id AND v.step > coalesce(resumed.epoch, -1)
    ), pointers AS (
        DELETE FROM hpsearch_checkpoints c USING mine WHERE c.trial_id = mine.trial_id AND :from_start
    ), rungs AS (
        DELETE FROM trial_system_attributes a USING mine
         WHERE a.trial_id = mine.trial_id AND starts_with(a.key, 'completed_rung_')
           AND (SELECT epoch FROM resumed) IS NULL
    ), places AS (
        DELETE FROM hpsearch_rungs r USING mine
         WHERE r.trial_id = mine.trial_id AND (SELECT epoch FROM resumed) IS NULL
    ), result AS (
        DELETE FROM trial_values v USING mine WHERE v.trial_id = mine.trial_id
    ), said AS (
        DELETE FROM trial_user_attributes a USING mine
         WHERE a.trial_id = mine.trial_id AND a.key IN (:infeasible, :reason, :tracking)
    ), failures AS (
        UPDATE hpsearch_attempts a
           SET ended_at = coalesce(ended_at, now()), outcome = coalesce(outcome || ', retried', 'cancelled') FROM mine
         WHERE a.trial_id = mine.trial_id AND (outcome IN ('lost', 'failed') OR outcome IS NULL)
    )
    SELECT resumed.epoch FROM mine, resumed
""")


_WAIT_AGAIN = sa.text("""
    WITH mine AS (
        UPDATE trials t SET state = 'WAITING', datetime_complete = NULL
          FROM hpsearch_rungs r
         WHERE t.study_id = :study AND t.state = 'PRUNED' AND r.trial_id = t.trial_id AND r.promoted_at IS NULL
           AND (SELECT count(*) FROM hpsearch_rungs o
                 WHERE o.study_id = :study AND o.rung = r.rung AND (o.loss, o.trial_id) < (r.loss, r.trial_id)
               ) < :places
        RETURNING t.trial_id
    ), result AS (
        DELETE FROM trial_values v USING mine WHERE v.trial_id = mine.trial_id
    ), said AS (
        DELETE FROM trial_user_attributes a USING mine
         WHERE a.trial_id = mine.trial_id AND a.key IN (:pruning, :reason, :tracking)
    )
    SELECT count(*) FROM mine
""")


def wait_again(connection: sa.Connection, study_id: int, *, places: int) -> int:
    """Let trials wait at their rungs again that were pruned there, where that many may go on; return how many do.

    Their checkpoints are gone: who goes on is trained anew to the rung, to the same values, which stay reported.
    """
    words = {"pruning": PRUNING, "reason": REASON, "tracking": TRACKING}
    return int(connection.execute(_WAIT_AGAIN, {"study": study_id, "places": places, **words}).scalar_one())


def reopen_trial(engine: sa.Engine, trial_id: int, *, from_start: bool) -> tuple[bool, int | None]:
    """Make a trial that is FAIL, or PRUNED as infeasible, the next to be claimed, with its number and parameters.

    Args:
        engine: of the study's database.
        trial_id: the trial.
        from_start: whether to forget its checkpoints and all it has reported.

    Returns:
        Whether the trial was in such a state (else nothing was written), and the last epoch, from 0, that it has a
        checkpoint of and goes on after; None to start anew.
    """
    arguments = {
        "trial": trial_id,
        "infeasible": INFEASIBLE,
        "reason": REASON,
        "tracking": TRACKING,
        "from_start": from_start,
    }
    with engine.begin() as connection:
        row = connection.execute(_REOPEN, arguments).one_or_none()
    return row is not None, None if row is None else row.epoch
