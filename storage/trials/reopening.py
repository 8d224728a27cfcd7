"""Reopen finished trials: failed trials, and trials that a larger budget allows to continue.

Optuna's storages do not change the state of a finished trial, so this module uses its own SQL statements.
"""

from __future__ import annotations

import sqlalchemy as sa

from hpsearch.storage.attributes import BUDGET_CUT, INFEASIBLE, PRUNING, REASON, TRACKING
from hpsearch.storage.rungs import fronts
from hpsearch.storage.rungs.rungs import Rungs, recompute_cutoffs
from hpsearch.storage.trials.claim_sql import LOCK_STUDY

# Deletes the values of reopened trials, and the attributes that explain them. Other processes have read the trials as
# finished; the update of the study's row makes them read the trials again (see study_storage/reading.py).
_DELETE_RESULT = f"""
    study AS (
        UPDATE studies SET study_name = study_name
         WHERE study_id IN (SELECT t.study_id FROM trials t JOIN mine USING (trial_id))
    ), result AS (
        DELETE FROM trial_values v USING mine WHERE v.trial_id = mine.trial_id
    ), said AS (
        DELETE FROM trial_user_attributes a USING mine
         WHERE a.trial_id = mine.trial_id
           AND a.key IN ('{INFEASIBLE}', '{BUDGET_CUT}', '{PRUNING}', '{REASON}', '{TRACKING}')
    )
"""  # noqa: S608 the parts are constants

# Values up to the last checkpoint are kept; later epochs are trained and reported again. Failed attempts are marked, so
# that they are not counted as failures any more. If another program set the trial to FAIL, its live attempt is ended.
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
    ), {_DELETE_RESULT}, failures AS (
        UPDATE hpsearch_attempts a
           SET ended_at = coalesce(ended_at, now()), outcome = coalesce(outcome || ', retried', 'cancelled') FROM mine
         WHERE a.trial_id = mine.trial_id AND (outcome IN ('lost', 'failed') OR outcome IS NULL)
    )
    SELECT resumed.epoch FROM mine, resumed
""")  # noqa: S608 the parts are constants


_REQUEUE_PRUNED_AT_RUNGS = sa.text(f"""
    WITH mine AS (
        UPDATE trials t SET state = 'WAITING', datetime_complete = NULL
          FROM hpsearch_rungs r JOIN hpsearch_rung_cuts c USING (study_id, rung)
         WHERE t.study_id = :study AND t.state = 'PRUNED' AND r.trial_id = t.trial_id AND r.study_id = :study
           AND r.retired_at IS NOT NULL AND (r.loss, r.trial_id) <= (c.last_loss, c.last_trial)
        RETURNING t.trial_id
    ), places AS (
        UPDATE hpsearch_rungs r SET retired_at = NULL FROM mine WHERE r.trial_id = mine.trial_id
    ), {_DELETE_RESULT}
    SELECT count(*) FROM mine
""")  # noqa: S608 the parts are constants


def requeue_pruned_at_rungs(connection: sa.Connection, study_id: int, rungs: Rungs, *, n_trials: int) -> int:
    """Set trials that were pruned at a rung to WAITING if they can be promoted within the larger budget.

    Checkpoints of pruned trials are deleted, so a trial that is promoted trains again from the start, and reports the
    same values up to the rung.

    Args:
        connection: connection whose transaction holds the lock of the study's row.
        study_id: id of the study.
        rungs: rungs of the study.
        n_trials: the new budget in trials.

    Returns:
        The number of requeued trials.
    """
    recompute_cutoffs(connection, study_id, rungs, n_trials=n_trials)
    return int(connection.execute(_REQUEUE_PRUNED_AT_RUNGS, {"study": study_id}).scalar_one())


_REQUEUE_STOPPED_TRIALS = sa.text(f"""
    WITH mine AS (
        UPDATE trials t SET state = 'WAITING', datetime_start = NULL, datetime_complete = NULL
          FROM trial_user_attributes a
         WHERE t.study_id = :study AND t.state = 'PRUNED' AND a.trial_id = t.trial_id AND a.key = '{BUDGET_CUT}'
        RETURNING t.trial_id
    ), {_DELETE_RESULT}
    SELECT count(*) FROM mine
""")  # noqa: S608 the parts are constants


def requeue_trials_stopped_by_budget(connection: sa.Connection, study_id: int) -> int:
    """Set trials that were pruned because the budget was spent to WAITING, to resume from their last checkpoints.

    Args:
        connection: connection whose transaction holds the lock of the study's row.
        study_id: id of the study.

    Returns:
        The number of requeued trials.
    """
    return int(connection.execute(_REQUEUE_STOPPED_TRIALS, {"study": study_id}).scalar_one())


def reopen_trial(
    engine: sa.Engine, study_id: int, trial_id: int, *, from_start: bool, rungs: Rungs | None = None
) -> tuple[bool, int | None]:
    """Set a trial that is FAIL, or PRUNED as infeasible, to WAITING; its number and parameters do not change.

    Args:
        engine: engine of the study's database.
        study_id: id of the study.
        trial_id: id of the trial.
        from_start: whether to delete the trial's checkpoints and reported values.
        rungs: rungs of the study; None if the pruner has no rungs.

    Returns:
        Two values. First, whether the trial was in such a state; if not, nothing was written. Second, the epoch (from
        0) of the checkpoint from which the trial will resume; None if the trial starts from scratch.
    """
    with engine.begin() as connection:
        study = connection.execute(LOCK_STUDY, {"study": study_id}).one_or_none()
        row = connection.execute(_REOPEN, {"trial": trial_id, "from_start": from_start}).one_or_none()
        # Without a checkpoint, the trial restarts below the first rung.
        if rungs is not None and study is not None and row is not None and row.epoch is None:
            fronts.rerank_all(connection, study_id, rungs.maximize_each)
            recompute_cutoffs(connection, study_id, rungs, n_trials=study.n_trials)
    return row is not None, None if row is None else row.epoch
