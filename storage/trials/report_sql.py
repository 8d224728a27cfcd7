"""SQL statements of reports: the values, the checkpoint and the budget of an epoch, in one statement."""

from __future__ import annotations

import sqlalchemy as sa

from hpsearch.storage.attributes import LAST_PROGRESS, STOPPED
from hpsearch.storage.database.fencing import FENCING
from hpsearch.storage.trials.budget import COUNT_SPENDING

_RENEW_OWN_LEASE = f"""
    mine AS (
        UPDATE hpsearch_attempts a SET expires_at = clock_timestamp() + :lease * interval '1 second'
          FROM trials t WHERE {FENCING}
        RETURNING a.trial_id, a.attempt
    )
"""  # noqa: S608 the part is a constant


# Failures are counted from this attempt on.
_PROGRESS = f"""
    INSERT INTO trial_user_attributes (trial_id, key, value_json)
    SELECT trial_id, '{LAST_PROGRESS}', attempt::text FROM mine WHERE attempt > 1 AND CAST(:path AS text) IS NOT NULL
"""  # noqa: S608 the part is a constant


_PROGRESS_AGAIN = """
    ON CONFLICT (trial_id, key) DO UPDATE SET value_json = excluded.value_json
     WHERE trial_user_attributes.value_json <> excluded.value_json
"""


_CHECKPOINT = """
    kept AS (
        INSERT INTO hpsearch_checkpoints (trial_id, epoch, attempt, path, sha256, size)
        SELECT trial_id, :step, attempt, :path, :sha256, CAST(:size AS bigint) FROM mine
         WHERE CAST(:path AS text) IS NOT NULL
        ON CONFLICT (trial_id, epoch)
        DO UPDATE SET attempt = excluded.attempt, path = excluded.path, sha256 = excluded.sha256, size = excluded.size
    )
"""


# A mid-epoch checkpoint replaces the checkpoint after the previous epoch.
RECORD_MID_EPOCH_CHECKPOINT = sa.text(f"""
    WITH {_RENEW_OWN_LEASE}, got_on AS ({_PROGRESS} {_PROGRESS_AGAIN}), {_CHECKPOINT}
    SELECT EXISTS (SELECT FROM mine) AS mine
""")  # noqa: S608 the parts are constants


_REPORT = f"""
    valued AS (
        INSERT INTO trial_intermediate_values (trial_id, step, intermediate_value, intermediate_value_type)
        SELECT trial_id, :step, CAST(:finite AS double precision), CAST(:type AS trialintermediatevaluetype) FROM mine
        ON CONFLICT (trial_id, step) DO NOTHING
        RETURNING trial_id
    ), {{others}} got_on AS ({_PROGRESS} AND EXISTS (SELECT FROM valued) {_PROGRESS_AGAIN}), {_CHECKPOINT}, dropped AS (
        DELETE FROM hpsearch_checkpoints
         WHERE trial_id IN (SELECT trial_id FROM mine) AND CAST(:path AS text) IS NOT NULL
           AND epoch < (SELECT max(epoch) FROM hpsearch_checkpoints WHERE trial_id = :trial_id AND epoch < :step)
    )
    SELECT EXISTS (SELECT FROM {{live}}) AS mine,
           EXISTS (SELECT FROM study_user_attributes
                    WHERE study_id = :study AND key = '{STOPPED}' AND value_json <> 'null') AS stopped
"""  # noqa: S608 the parts are constants


# For multi-objective studies and studies with folds.
_INSERT_VALUES = """
    others AS (
        INSERT INTO hpsearch_epoch_values (trial_id, step, metrics, folds)
        SELECT trial_id, :step, CAST(:metrics AS double precision[]), CAST(:folds AS double precision[]) FROM mine
        ON CONFLICT (trial_id, step) DO NOTHING
    ),
"""


def _report(others: str) -> sa.TextClause:
    return sa.text(f"WITH {_RENEW_OWN_LEASE}, {_REPORT.format(live='mine', others=others)}")


# For studies with a budget in epochs or seconds.
def _report_within_budget(others: str) -> sa.TextClause:
    return sa.text(f"""
    WITH {COUNT_SPENDING}, mine AS (
        SELECT trial_id, attempt FROM live WHERE EXISTS (SELECT FROM paid)
    ), {_REPORT.format(live="live", others=others)},
           EXISTS (SELECT FROM paid) AS counted,
           coalesce((SELECT (epochs + (SELECT count(*) FROM hpsearch_attempts a JOIN trials t USING (trial_id)
                                        WHERE t.study_id = :study AND t.state = 'RUNNING' AND a.ended_at IS NULL
                                          AND a.trial_id <> :trial_id) < budget_epochs) IS NOT FALSE
                        AND (seconds < budget_seconds) IS NOT FALSE FROM paid), false) AS room
""")  # noqa: S608 the parts are constants


# Keys: whether the study has a budget in epochs or seconds, and whether it stores several values per epoch.
REPORT = {
    (False, False): _report(""),
    (False, True): _report(_INSERT_VALUES),
    (True, False): _report_within_budget(""),
    (True, True): _report_within_budget(_INSERT_VALUES),
}


# A trial that has reported all of its epochs needs no budget.
HAS_ALL_EPOCHS = sa.text("SELECT count(*) >= :epochs FROM trial_intermediate_values WHERE trial_id = :trial")


SELECT_LAST_EPOCH = sa.text("""
    SELECT t.number, (SELECT max(attempt) FROM hpsearch_attempts a WHERE a.trial_id = t.trial_id) AS attempt,
           (SELECT max(step) FROM trial_intermediate_values v WHERE v.trial_id = t.trial_id) AS step
      FROM trials t WHERE t.trial_id = :trial
""")
