"""The workers of a study: identity, machine, current trial, and exit."""

from __future__ import annotations

import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from hpsearch.storage.database.retry import RETRY_SECONDS
from hpsearch.storage.database.statements import Database
from hpsearch.storage.trials.claim_sql import OUTCOME_OR_CAUSE
from hpsearch.storage.trials.process_identity import get_machine_prefix, get_process_name, has_ended

_HEARTBEAT_SECONDS = 10.0  # interval of heartbeats of a worker without a trial; other workers renew a lease instead
SILENT_SECONDS = 6 * _HEARTBEAT_SECONDS  # time without a heartbeat after which a worker without a trial counts as lost

_INSERT = sa.text("""
    INSERT INTO hpsearch_workers (worker_id, study_id, name, host, pid, process, engine, job, device, version)
    VALUES (:worker, :study, :name, :host, :pid, :process, :engine, :job, :device, :version)
    ON CONFLICT (worker_id) DO NOTHING
""")
_UPDATE_SEEN = sa.text("UPDATE hpsearch_workers SET seen_at = clock_timestamp() WHERE worker_id = :worker")
_SELECT_PROCESSES = sa.text("""
    SELECT DISTINCT process FROM hpsearch_workers WHERE left_at IS NULL AND starts_with(process, :machine)
""")
_UPDATE_LEFT = sa.text("""
    UPDATE hpsearch_workers SET seen_at = clock_timestamp(), left_at = clock_timestamp(), left_as = :how
     WHERE worker_id = :worker
""")


@dataclass(frozen=True)
class WorkerIdentity:
    """Identity of a worker.

    Attributes:
        name: unique name of the worker.
        host: name of the worker's machine.
        pid: process id.
        engine, job: the engine that started the worker, and the id of the job; None if a user started the worker.
        device: device of the worker, such as "2 x cuda".
        version: version of hpsearch.
    """

    name: str
    host: str
    pid: int
    engine: str | None
    job: str | None
    device: str
    version: str


class WorkerRegistration:
    """Registration of one worker in the database; a write is skipped if the database is unavailable."""

    def __init__(self, engine: sa.Engine, study_id: int, identity: WorkerIdentity) -> None:
        self._engine, self._study_id, self._identity = engine, study_id, identity
        self._id = uuid.uuid4()
        self._seen_at = time.monotonic()

    def register(self) -> None:
        """Insert the row of this worker."""
        self._write(_INSERT, study=self._study_id, process=get_process_name(), **vars(self._identity))

    def send_heartbeat(self) -> None:
        """Update the time of the worker's last heartbeat, at most every 10 seconds."""
        if time.monotonic() - self._seen_at > _HEARTBEAT_SECONDS:
            self._seen_at = time.monotonic()
            self._write(_UPDATE_SEEN)

    def count_on_machine(self) -> int:
        """Return the number of workers that run on this machine; 0 if the database is unavailable."""
        with suppress(SQLAlchemyError), self._engine.begin() as connection:
            processes = connection.execute(_SELECT_PROCESSES, {"machine": f"{get_machine_prefix()}/"}).scalars()
            return sum(not has_ended(process) for process in processes)
        return 0

    def record_exit(self, how: str) -> None:
        """Record that the worker exits, and the reason of the exit."""
        self._write(_UPDATE_LEFT, how=how)

    def _write(self, statement: sa.TextClause, **values: object) -> None:
        with suppress(SQLAlchemyError), self._engine.begin() as connection:
            connection.execute(statement, {"worker": self._id, **values})


@dataclass(frozen=True)
class WorkerRow:
    """A registered worker and its current work.

    Attributes:
        identity: identity of the worker.
        state: ``running`` (with a trial), ``idle`` (without a trial), ``left`` (has exited), or ``lost`` (no heartbeat,
            and no recorded exit).
        trial: number of the current trial; None if the worker has no trial.
        epoch: last reported epoch of the current trial, from 1; 0 before the first report; None if there is no trial.
        trials: number of trials that the worker has ended as COMPLETE or PRUNED.
        started_at, seen_at: start and last heartbeat of the worker, by the database's clock.
        lease_left: seconds until the lease expires; None if the worker has no trial.
        left_as: recorded reason of the exit; None if the worker has not exited.
    """

    identity: WorkerIdentity
    state: str
    trial: int | None
    epoch: int | None
    trials: int
    started_at: datetime
    seen_at: datetime
    lease_left: float | None
    left_as: str | None


_SELECT_WORKERS = sa.text(f"""
    SELECT w.*, a.number, a.lease_left, a.expired, v.step, done.trials,
           greatest(w.seen_at, a.renewed_at) AS seen,
           extract(epoch FROM clock_timestamp() - w.seen_at) > {SILENT_SECONDS} AS silent
      FROM hpsearch_workers w
      LEFT JOIN LATERAL (
           SELECT t.trial_id, t.number, extract(epoch FROM a.expires_at - clock_timestamp()) AS lease_left,
                  a.expires_at < clock_timestamp() AS expired,
                  a.expires_at - a.lease * interval '1 second' AS renewed_at
             FROM hpsearch_attempts a JOIN trials t USING (trial_id)
            WHERE t.study_id = w.study_id AND a.worker = w.name AND a.ended_at IS NULL
            ORDER BY a.started_at DESC LIMIT 1) a ON true
      LEFT JOIN LATERAL (
           SELECT max(step) AS step FROM trial_intermediate_values i WHERE i.trial_id = a.trial_id) v ON true
      LEFT JOIN LATERAL (
           SELECT count(*) AS trials FROM hpsearch_attempts a JOIN trials t USING (trial_id)
            WHERE t.study_id = w.study_id AND a.worker = w.name
              AND a.outcome IN ('complete', 'pruned', 'infeasible')) done ON true
     WHERE w.study_id = :study
     ORDER BY w.left_at IS NOT NULL, w.started_at, w.name
""")  # noqa: S608 the part is a constant


def read_workers(engine: sa.Engine, study_id: int, *, retry_seconds: float = RETRY_SECONDS) -> list[WorkerRow]:
    """Return the workers of a study; workers that have not exited come first."""
    found = []
    for row in Database(engine, retry_seconds).fetch_rows(_SELECT_WORKERS, {"study": study_id}):
        lost = has_ended(row.process) or (row.silent if row.number is None else row.expired)
        state = "left" if row.left_at else "lost" if lost else "idle" if row.number is None else "running"
        found.append(
            WorkerRow(
                identity=WorkerIdentity(row.name, row.host, row.pid, row.engine, row.job, row.device, row.version),
                state=state,
                trial=row.number,
                epoch=None if row.number is None else 0 if row.step is None else row.step + 1,
                trials=row.trials,
                started_at=row.started_at,
                seen_at=row.seen,
                lease_left=None if row.lease_left is None else float(row.lease_left),
                left_as=row.left_as,
            )
        )
    return found


@dataclass(frozen=True)
class AttemptEnd:
    """End of an attempt.

    Attributes:
        at: time of the end.
        trial: number of the trial.
        outcome: value of the attempt's `Outcome`, or the cause of its loss.
        worker: name of the worker.
        reason: reason of the trial's outcome, if the trial ended with this attempt; else None.
    """

    at: datetime
    trial: int
    outcome: str
    worker: str
    reason: str | None


_SELECT_ATTEMPT_ENDS = sa.text(f"""
    SELECT a.ended_at, t.number, a.worker,
           CASE WHEN last.it AND a.outcome = 'paused' AND t.state = 'PRUNED' THEN 'pruned'
                ELSE {OUTCOME_OR_CAUSE} END AS outcome,
           CASE WHEN last.it THEN reason.value_json::jsonb #>> '{{}}' END AS reason
      FROM hpsearch_attempts a JOIN trials t USING (trial_id)
      JOIN LATERAL (
        SELECT t.state NOT IN ('RUNNING', 'WAITING') AND NOT EXISTS (
                SELECT FROM hpsearch_attempts o WHERE o.trial_id = a.trial_id AND o.attempt > a.attempt) AS it
      ) last ON true
      LEFT JOIN trial_user_attributes reason ON reason.trial_id = t.trial_id AND reason.key = :reason
     WHERE t.study_id = :study AND a.ended_at IS NOT NULL
     ORDER BY a.ended_at DESC LIMIT :limit
""")  # noqa: S608 the part is a constant


def read_attempt_ends(
    engine: sa.Engine, study_id: int, *, limit: int = 20, retry_seconds: float = RETRY_SECONDS
) -> list[AttemptEnd]:
    """Return the ends of the last `limit` attempts of a study, the newest first."""
    from hpsearch.storage.attributes import REASON

    arguments = {"study": study_id, "limit": limit, "reason": REASON}
    rows = Database(engine, retry_seconds).fetch_rows(_SELECT_ATTEMPT_ENDS, arguments)
    return [AttemptEnd(row.ended_at, row.number, row.outcome, row.worker, row.reason) for row in rows]


# Ends of attempts after which the trial had no result.
_SELECT_LOSS_COUNTS = sa.text(f"""
    SELECT {OUTCOME_OR_CAUSE} AS outcome, count(*) AS attempts
      FROM hpsearch_attempts a JOIN trials t USING (trial_id)
     WHERE t.study_id = :study AND a.outcome IN ('released', 'lost', 'failed') GROUP BY 1 ORDER BY 2 DESC, 1
""")  # noqa: S608 the part is a constant


def read_loss_counts(engine: sa.Engine, study_id: int, *, retry_seconds: float = RETRY_SECONDS) -> dict[str, int]:
    """Return the number of attempts without a result, by outcome or cause of the loss, the most frequent first.

    ``released`` counts the attempts whose worker was stopped, for example by a preemption with a grace period. The
    cause of a ``lost`` attempt is unknown.
    """
    rows = Database(engine, retry_seconds).fetch_rows(_SELECT_LOSS_COUNTS, {"study": study_id})
    return {row.outcome: row.attempts for row in rows}
