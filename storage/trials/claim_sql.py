"""SQL statements of claims. All times are by the database's clock.

The statements use `clock_timestamp()` instead of the start of the transaction, because a claim may wait for a lock.
"""

from __future__ import annotations

import sqlalchemy as sa

from hpsearch.storage.attributes import EARLY_TERMINATION, LAST_PROGRESS, SPEC, STOPPED
from hpsearch.storage.database.fencing import FENCING
from hpsearch.storage.database.locks import IDLE_TIMEOUT
from hpsearch.storage.database.trial_rows import FIRST_START, NEXT_NUMBER
from hpsearch.storage.rungs.rungs import EXCEPT_PAUSED

# Locks the study's row, as Optuna does to number a trial, and the spec's row, so that a claim that waited for a change
# of the budget reads the new one. A later statement counts the trials, because this one sees the state before the wait.
LOCK_STUDY = sa.text(f"""
    {IDLE_TIMEOUT}
    SELECT spec.value_json AS spec, (spec.value_json::jsonb ->> 'n_trials')::int AS n_trials,
           CASE WHEN coalesce(spec.value_json::jsonb -> 'retry_on', '["lost"]') ? 'lost'
                THEN (spec.value_json::jsonb ->> 'retries')::int ELSE 0 END AS retries,
           stopped.value_json::jsonb #>> '{{}}' AS stopped
      FROM studies s
      JOIN study_user_attributes spec ON spec.study_id = s.study_id AND spec.key = '{SPEC}'
      LEFT JOIN study_user_attributes stopped ON stopped.study_id = s.study_id AND stopped.key = '{STOPPED}'
     WHERE s.study_id = :study
       FOR UPDATE OF s, spec
""")  # noqa: S608 the parts are constants

# Share of a failure of the trial as which the loss of a worker counts whose cause is unknown: its machine may have been
# preempted, or the trial may have killed it. Before the training, the trial is rarely the cause.
LOSS_WEIGHT_AT_START, LOSS_WEIGHT_IN_TRAINING = 0.1, 0.25

# Lost and failed attempts since the trial last made progress: an attempt that is preempted after some epochs resets the
# count, and an epoch that kills every worker gets no extra tries for the epochs before it.
_COUNT_FAILURES = f"""
    SELECT floor(coalesce(sum(CASE b.outcome WHEN 'failed' THEN 1 ELSE b.loss_weight END), 0))::int
           AS failures, count(*) AS attempts, string_agg(DISTINCT b.loss_cause, ', ') AS causes
      FROM hpsearch_attempts b
     WHERE b.trial_id = {{trial}} AND (b.outcome IN ('lost', 'failed') {{also}})
       AND b.attempt >= coalesce((SELECT value_json::int FROM trial_user_attributes g
                                   WHERE g.trial_id = b.trial_id AND g.key = '{LAST_PROGRESS}'), 1)
"""  # noqa: S608 the parts are constants

# A lease that expired while the server was down does not show that the worker is dead. The recovery of the server is
# part of the time since its start, so workers get two leases to reconnect.
_IS_EXPIRED = """
    (a.expires_at < clock_timestamp()
     AND pg_postmaster_start_time() < clock_timestamp() - 2 * a.lease * interval '1 second')
"""

SELECT_LIVE_ATTEMPTS = sa.text(f"""
    SELECT a.process, {_IS_EXPIRED} AS expired
      FROM hpsearch_attempts a JOIN trials t USING (trial_id)
     WHERE t.study_id = :study AND a.ended_at IS NULL
""")  # noqa: S608 the part is a constant

# Selects only live attempts whose process may have ended; a large fleet has many other live attempts. The counts
# include the live attempt.
SELECT_SUSPECT_ATTEMPTS = sa.text(f"""
    SELECT a.trial_id, a.attempt, a.worker, a.process, a.lease, t.number, t.state, {_IS_EXPIRED} AS expired,
           counted.failures, counted.attempts, counted.causes
      FROM hpsearch_attempts a JOIN trials t USING (trial_id)
      CROSS JOIN LATERAL ({_COUNT_FAILURES.format(trial="a.trial_id", also="OR b.attempt = a.attempt")}) counted
     WHERE t.study_id = :study AND a.ended_at IS NULL AND ({_IS_EXPIRED} OR starts_with(a.process, :machine))
     ORDER BY t.number
""")  # noqa: S608 the parts are constants

# `opens`: number of trials that may be started; fewer than `n_trials` after early termination.
_SELECT_CANDIDATES = f"""
    WITH waiting AS (
        SELECT trial_id, number, EXISTS (SELECT FROM hpsearch_attempts a WHERE a.trial_id = t.trial_id) AS started
          FROM trials t WHERE study_id = :study AND state = 'WAITING' {{which}}
    )
    SELECT (SELECT coalesce(max(number) + 1, 0) FROM trials WHERE study_id = :study) AS total,
           (SELECT count(*) FROM waiting WHERE NOT started) AS enqueued,
           (SELECT trial_id FROM waiting WHERE started ORDER BY number LIMIT 1) AS given_back,
           (SELECT trial_id FROM waiting WHERE NOT started ORDER BY number LIMIT 1) AS next_enqueued,
           (SELECT count(*) FROM hpsearch_attempts a JOIN trials t USING (trial_id)
             WHERE t.study_id = :study AND t.state = 'RUNNING' AND a.ended_at IS NULL) AS running,
           least(:n_trials, (SELECT (value_json::jsonb ->> 'started')::int FROM study_user_attributes
                              WHERE study_id = :study AND key = '{EARLY_TERMINATION}')) AS opens
"""  # noqa: S608 the part is a constant
SELECT_CANDIDATES = sa.text(_SELECT_CANDIDATES.format(which=""))
SELECT_CANDIDATES_EXCEPT_PAUSED = sa.text(_SELECT_CANDIDATES.format(which=EXCEPT_PAUSED))

_INSERT_LEASE = """
    lease AS (
        INSERT INTO hpsearch_attempts
               (trial_id, attempt, claim_id, worker, process, lease, loss_weight, started_at, expires_at)
        SELECT trial_id, attempt, :claim, :worker, :process, :lease, :loss_weight, clock_timestamp(),
               clock_timestamp() + :lease * interval '1 second' FROM mine
    ), noted AS (
        INSERT INTO trial_user_attributes (trial_id, key, value_json)
        SELECT trial_id, key, value_json FROM mine,
               unnest(CAST(:keys AS text[]), ARRAY[attempt::text, to_json(CAST(:worker AS text))::text])
               AS attr (key, value_json)
        ON CONFLICT (trial_id, key) DO UPDATE SET value_json = excluded.value_json
    )
"""

CLAIM_WAITING_TRIAL = sa.text(f"""
    WITH mine AS (
        UPDATE trials t
           SET state = 'RUNNING',
               datetime_start = coalesce({FIRST_START}, timezone('utc', clock_timestamp()))
         WHERE trial_id = :trial AND state = 'WAITING'
        RETURNING trial_id, number,
                  (SELECT coalesce(max(attempt), 0) + 1 FROM hpsearch_attempts a WHERE a.trial_id = t.trial_id)
                  AS attempt
    ), {_INSERT_LEASE}
    SELECT number, attempt FROM mine
""")  # noqa: S608 the parts are constants

CLAIM_NEW_TRIAL = sa.text(f"""
    WITH mine AS (
        INSERT INTO trials (study_id, number, state, datetime_start)
        VALUES (:study_id, {NEXT_NUMBER}, 'RUNNING', timezone('utc', clock_timestamp()))
        RETURNING trial_id, number, 1 AS attempt
    ), {_INSERT_LEASE}
    SELECT trial_id, number FROM mine
""")  # noqa: S608 the parts are constants

CHECK_OWNERSHIP = sa.text(f"SELECT FROM trials t, hpsearch_attempts a WHERE {FENCING}")


COUNT_FAILURES = sa.text(_COUNT_FAILURES.format(trial=":trial", also=""))

SET_LEASE = sa.text("""
    UPDATE hpsearch_attempts
       SET expires_at = clock_timestamp() + :lease * interval '1 second',
           loss_weight = CASE WHEN :lease < 0 THEN 1 ELSE loss_weight END  -- 1: the worker gave the attempt up
     WHERE trial_id = :trial AND attempt = :attempt AND ended_at IS NULL
""")

# The last attempt of the process is live, or another worker of the machine has already ended it as lost.
SET_LOSS_CAUSE = sa.text("""
    UPDATE hpsearch_attempts SET loss_cause = :cause, loss_weight = :weight
     WHERE process = :process AND (ended_at IS NULL OR outcome = 'lost')
       AND started_at = (SELECT max(started_at) FROM hpsearch_attempts WHERE process = :process)
""")

# For users: a loss of known cause has the name of the cause, also before ", retried".
OUTCOME_OR_CAUSE = "replace(a.outcome, 'lost', coalesce(a.loss_cause, 'lost'))"

SET_LOSS_WEIGHT = sa.text("""
    UPDATE hpsearch_attempts SET loss_weight = :weight
     WHERE trial_id = :trial AND attempt = :attempt AND ended_at IS NULL
""")
