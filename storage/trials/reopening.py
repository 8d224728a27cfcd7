"""A trial that failed is made claimable again: the same trial, from its last checkpoint or from its beginning.

Optuna's storages let no trial leave a finished state, so that this is a statement of our own. So are those that waited
at a rung in vain, or ran when the budget was spent, when it grows.
"""

from __future__ import annotations

import sqlalchemy as sa

from hpsearch.storage.attributes import CUT, INFEASIBLE, PRUNING, REASON, TRACKING
from hpsearch.storage.rungs import fronts
from hpsearch.storage.rungs.rungs import Rungs, count_places
from hpsearch.storage.trials.claim_sql import STUDY

# The result of a reopened trial and the attributes that explain it.
_FORGET_RESULT = f"""
    result AS (
        DELETE FROM trial_values v USING mine WHERE v.trial_id = mine.trial_id
    ), said AS (
        DELETE FROM trial_user_attributes a USING mine
         WHERE a.trial_id = mine.trial_id AND a.key IN ('{INFEASIBLE}', '{CUT}', '{PRUNING}', '{REASON}', '{TRACKING}')
    )
"""  # noqa: S608 the parts are constants

# The steps that its last checkpoint has stay reported; the others are run, and reported, again. Attempts that came to
# nothing are marked, so that they no longer count against the trial's retries. One that is live, at a trial that was
# failed from outside, is ended: its worker has not noticed yet.
_REOPEN = sa.text(f"""
    WITH mine AS (
        UPDATE trials t SET state = 'WAITING', datetime_start = NULL, datetime_complete = NULL
         WHERE trial_id = :trial
           AND (state = 'FAIL' OR state = 'PRUNED' AND EXISTS (
                SELECT FROM trial_user_attributes a
                 WHERE a.trial_id = t.trial_id AND a.key = '{INFEASIBLE}' AND a.value_json = 'true'))
        RETURNING trial_id
    ), resumed AS (
        SELECT max(epoch) AS epoch FROM hpsearch_checkpoints JOIN mine USING (trial_id) WHERE NOT :from_start
    ), steps AS (
        DELETE FROM trial_intermediate_values v USING mine, resumed
         WHERE v.trial_id = mine.trial_id AND v.step > coalesce(resumed.epoch, -1)
        RETURNING v.trial_id
    ), others AS (
        DELETE FROM hpsearch_epoch_values v USING mine, resumed
         WHERE v.trial_id = mine.trial_id AND v.step > coalesce(resumed.epoch, -1)
    ), spent AS (
        UPDATE hpsearch_spending s SET epochs = s.epochs - (SELECT count(*) FROM steps)
          FROM trials t WHERE t.trial_id = :trial AND s.study_id = t.study_id
    ), pointers AS (
        DELETE FROM hpsearch_checkpoints c USING mine WHERE c.trial_id = mine.trial_id AND :from_start
    ), rungs AS (
        DELETE FROM trial_system_attributes a USING mine
         WHERE a.trial_id = mine.trial_id AND starts_with(a.key, 'completed_rung_')
           AND (SELECT epoch FROM resumed) IS NULL
    ), places AS (
        DELETE FROM hpsearch_rungs r USING mine
         WHERE r.trial_id = mine.trial_id AND (SELECT epoch FROM resumed) IS NULL
    ), {_FORGET_RESULT}, failures AS (
        UPDATE hpsearch_attempts a
           SET ended_at = coalesce(ended_at, now()), outcome = coalesce(outcome || ', retried', 'cancelled') FROM mine
         WHERE a.trial_id = mine.trial_id AND (outcome IN ('lost', 'failed') OR outcome IS NULL)
    )
    SELECT resumed.epoch FROM mine, resumed
""")  # noqa: S608 the parts are constants


_WAIT_AGAIN = sa.text(f"""
    WITH mine AS (
        UPDATE trials t SET state = 'WAITING', datetime_complete = NULL
          FROM hpsearch_rungs r JOIN hpsearch_rung_cuts c USING (study_id, rung)
         WHERE t.study_id = :study AND t.state = 'PRUNED' AND r.trial_id = t.trial_id AND r.study_id = :study
           AND r.retired_at IS NOT NULL AND (r.loss, r.trial_id) <= (c.last_loss, c.last_trial)
        RETURNING t.trial_id
    ), places AS (
        UPDATE hpsearch_rungs r SET retired_at = NULL FROM mine WHERE r.trial_id = mine.trial_id
    ), {_FORGET_RESULT}
    SELECT count(*) FROM mine
""")  # noqa: S608 the parts are constants


def wait_again(connection: sa.Connection, study_id: int, rungs: Rungs, *, n_trials: int) -> int:
    """Let trials wait at their rungs again that were pruned there, where a budget has places; return how many do.

    Their checkpoints are gone: who goes on is trained anew to the rung, to the same values, which stay reported.

    Args:
        connection: in a transaction that holds the study's row.
        study_id: the study.
        rungs: of the study.
        n_trials: its budget from now on.
    """
    count_places(connection, study_id, rungs, n_trials=n_trials)
    return int(connection.execute(_WAIT_AGAIN, {"study": study_id}).scalar_one())


_GO_ON_AGAIN = sa.text(f"""
    WITH mine AS (
        UPDATE trials t SET state = 'WAITING', datetime_start = NULL, datetime_complete = NULL
          FROM trial_user_attributes a
         WHERE t.study_id = :study AND t.state = 'PRUNED' AND a.trial_id = t.trial_id AND a.key = '{CUT}'
        RETURNING t.trial_id
    ), {_FORGET_RESULT}
    SELECT count(*) FROM mine
""")  # noqa: S608 the parts are constants


def go_on_again(connection: sa.Connection, study_id: int) -> int:
    """Let trials go on that ran when the budget was spent; return how many do: after their last checkpoint.

    Args:
        connection: in a transaction that holds the study's row.
        study_id: the study.
    """
    return int(connection.execute(_GO_ON_AGAIN, {"study": study_id}).scalar_one())


def reopen_trial(
    engine: sa.Engine, study_id: int, trial_id: int, *, from_start: bool, rungs: Rungs | None = None
) -> tuple[bool, int | None]:
    """Make a trial that is FAIL, or PRUNED as infeasible, the next to be claimed, with its number and parameters.

    Args:
        engine: of the study's database.
        study_id: the study of the trial.
        trial_id: the trial.
        from_start: whether to forget its checkpoints and all it has reported.
        rungs: of its study, if trials wait there.

    Returns:
        Whether the trial was in such a state (else nothing was written), and the last epoch, from 0, that it has a
        checkpoint of and goes on after; None to start anew.
    """
    with engine.begin() as connection:
        study = connection.execute(STUDY, {"study": study_id}).one_or_none()
        row = connection.execute(_REOPEN, {"trial": trial_id, "from_start": from_start}).one_or_none()
        if rungs is not None and study is not None and row is not None and row.epoch is None:  # it left them
            fronts.place_all(connection, study_id, rungs.several)
            count_places(connection, study_id, rungs, n_trials=study.n_trials)
    return row is not None, None if row is None else row.epoch
