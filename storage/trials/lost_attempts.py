"""Attempts whose worker is dead: their lease has expired, or their process has ended on this machine."""

from __future__ import annotations

import time
from enum import Enum

import sqlalchemy as sa

from hpsearch.storage.attributes import REASON
from hpsearch.storage.database.statements import Database
from hpsearch.storage.trials import claim_sql, finishing
from hpsearch.storage.trials.claim_results import RetriesExhausted
from hpsearch.storage.trials.finishing import Outcome
from hpsearch.storage.trials.process_identity import get_machine_prefix, has_ended


class LossCause(Enum):
    """Cause of the loss of an attempt, as known to the parent of the worker's process."""

    OUT_OF_MEMORY = "out of memory"  # the kernel's OOM killer ended the process
    CRASHED = "crashed"  # another signal such as SIGSEGV, or code of the objective that ended the process
    KILLED = "killed"  # another process sent the signal, as for a preemption

    @property
    def weight(self) -> float:
        """The share of a failure of the trial as which the loss counts."""
        return claim_sql.LOSS_WEIGHT_IN_TRAINING if self is LossCause.KILLED else 1.0


def record_loss_cause(engine: sa.Engine, process: str, cause: LossCause) -> None:
    """Record the cause of the loss of an attempt, if a process was running one when it ended.

    Args:
        engine: engine of the study's database.
        process: name of the process; see `process_identity`.
        cause: the cause.
    """
    with engine.begin() as connection:
        arguments = {"process": process, "cause": cause.value, "weight": cause.weight}
        connection.execute(claim_sql.SET_LOSS_CAUSE, arguments)


def end_lost_attempts(
    connection: sa.Connection, study_id: int, *, retries: int, back_at: float, fail: bool = True
) -> RetriesExhausted | None:
    """End the attempts of dead workers. A trial with retries left waits for another worker.

    Args:
        connection: connection whose transaction holds the lock of the study.
        study_id: id of the study.
        retries: maximum number of failures after which a trial is still retried.
        back_at: time, as `time.monotonic()`, when the database was last available again after an outage. During the
            outage no worker could renew a lease, so leases count as expired only a whole lease period later.
        fail: whether to set the first trial without retries left to FAIL and return it.
    """
    suspects = {"study": study_id, "machine": f"{get_machine_prefix()}/"}
    for row in connection.execute(claim_sql.SELECT_SUSPECT_ATTEMPTS, suspects).all():
        expired = row.expired and time.monotonic() - back_at > row.lease
        if not (expired or has_ended(row.process)):
            continue
        if row.state != "RUNNING":  # another program set the state, and then the worker died
            finishing.close_attempt(connection, row.trial_id, row.attempt, Outcome.CANCELLED)
        elif row.failures <= retries:
            finishing.finish_attempt(connection, row.trial_id, row.attempt, Outcome.LOST, retry=True)
        elif fail:
            causes = f" ({row.causes})" if row.causes else ""
            attempts = "1 attempt" if row.attempts == 1 else f"{row.attempts} attempts"
            reason = f"lost its worker {row.worker}; {attempts} without progress{causes}"
            finishing.finish_attempt(connection, row.trial_id, row.attempt, Outcome.LOST, attrs={REASON: reason})
            return RetriesExhausted(row.trial_id, row.number, row.attempt, reason)
    return None


def count_running_trials(engine: sa.Engine, study_id: int) -> int:
    """Return the number of running trials of a study, except trials whose worker is known to be dead."""
    rows = Database(engine).fetch_rows(claim_sql.SELECT_LIVE_ATTEMPTS, {"study": study_id})
    return sum(not (row.expired or has_ended(row.process)) for row in rows)
