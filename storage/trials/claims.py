"""Claims: take a trial, and write its results under a lease and a fencing token."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from hpsearch.kill_points import kill_point
from hpsearch.storage.attributes import ATTEMPT, RUNG, WORKER
from hpsearch.storage.database.connect import open_autocommit
from hpsearch.storage.database.fencing import make_claim_lost_error
from hpsearch.storage.database.retry import RETRY_SECONDS
from hpsearch.storage.database.statements import Database
from hpsearch.storage.database.trial_rows import encode_value
from hpsearch.storage.errors import StorageError
from hpsearch.storage.rungs.rungs import (
    PrunedTrial,
    RungRank,
    Rungs,
    read_rung_rank,
    record_promotion,
    record_rung_value,
)
from hpsearch.storage.study_storage.lost_replies import find_claim, has_ended_as
from hpsearch.storage.trials import LEASE, claim_sql, finishing, report_sql
from hpsearch.storage.trials.claim_results import Claim, ClaimResult, NoTrialAvailable, ReportResult, StudyStopped
from hpsearch.storage.trials.finishing import Outcome
from hpsearch.storage.trials.lost_attempts import end_lost_attempts
from hpsearch.storage.trials.process_identity import get_process_name
from hpsearch.storage.trials.trial_queue import TrialQueue

if TYPE_CHECKING:
    from hpsearch.storage.checkpoints.store import StoredFile


class Claims:
    """Claims of one worker in one study.

    Args:
        engine: engine of the study's database.
        study_id: id of the study; every claim reads the current budget in trials, and `retries`, from the database.
        worker: name of the worker.
        lease: seconds without a renewal after which another worker may take the trial.
        retry_seconds: longest time in seconds to retry while the database is unavailable.
        rungs: rungs at which trials pause; None if the pruner has no rungs.
        metered_epochs: number of epochs of a full trial, if the study has a budget in epochs or seconds; else None.
        may_be_preempted: whether the death of this worker may be a preemption. Such a death counts as a fraction of a
            failure of the trial: a tenth before the training, a quarter in the training.
    """

    def __init__(  # noqa: PLR0913 keywords
        self,
        engine: sa.Engine,
        study_id: int,
        *,
        worker: str,
        lease: float = LEASE,
        retry_seconds: float = RETRY_SECONDS,
        rungs: Rungs | None = None,
        metered_epochs: int | None = None,
        may_be_preempted: bool = False,
    ) -> None:
        self._engine = engine
        self._database = Database(engine, retry_seconds)
        self._study_id = study_id
        self._worker = worker
        self._process = get_process_name()
        self.lease = lease
        self._rungs = rungs
        self._metered_epochs = metered_epochs
        self._queue = TrialQueue(study_id, rungs, metered_epochs)
        self._may_be_preempted = may_be_preempted
        self._back_at = -math.inf  # time at which the database became available again after the last outage

    def record_outage(self) -> None:
        """Record the end of a database outage, during which no worker could renew a lease.

        This process then treats a lease as expired only after a whole lease period from now.
        """
        self._back_at = time.monotonic()

    @kill_point("claim")
    def claim(self, *, open_new: bool = True) -> ClaimResult:
        """Take a trial, or end a trial that cannot continue.

        If a claim ends a trial and the reply to its commit is lost, no caller receives the result. The MLflow run of
        this trial is then ended together with the run of the study.

        Args:
            open_new: whether to take trials that were never started or wait at a rung; False after the study's timeout.

        Returns:
            The claim of the trial; or a failed or pruned trial, after which the caller claims again; or the reason why
            no trial is available.

        Raises:
            StorageError: the study was deleted.
        """
        claim_id = uuid.uuid4()

        def take_trial(connection: sa.Connection, repeated: bool) -> ClaimResult:
            if repeated:  # the first try may have been committed, with its reply lost
                self.record_outage()
                claimed = find_claim(connection, claim_id)
                if claimed is not None:
                    return Claim(claimed.trial_id, claimed.number, claimed.attempt)
            return self._take(connection, claim_id, open_new=open_new)

        return self._database.run_transaction(take_trial)

    @kill_point("write claim")
    def _take(self, connection: sa.Connection, claim_id: uuid.UUID, *, open_new: bool) -> ClaimResult:
        if (study := self._queue.lock_study(connection)) is None:
            raise StorageError("the study was deleted")
        if study.stopped is not None:
            return StudyStopped(study.stopped)
        if lost := end_lost_attempts(connection, self._study_id, retries=study.retries, back_at=self._back_at):
            return lost
        chosen = self._queue.choose_next(connection, study, open_new=open_new)
        if isinstance(chosen, PrunedTrial | NoTrialAvailable):
            return chosen
        arguments = {
            "study_id": self._study_id,
            "claim": claim_id,
            "worker": self._worker,
            "process": self._process,
            "lease": self.lease,
            "loss_weight": claim_sql.LOSS_WEIGHT_AT_START if self._may_be_preempted else 1,
            "keys": [ATTEMPT, WORKER],
        }
        if chosen.trial_id is None:
            new = connection.execute(claim_sql.CLAIM_NEW_TRIAL, arguments).one()
            return Claim(new.trial_id, new.number, 1)
        waiting = {**arguments, "trial": chosen.trial_id}
        taken = connection.execute(claim_sql.CLAIM_WAITING_TRIAL, waiting).one_or_none()
        if taken is None:  # another program has just changed the state of the trial
            return self._take(connection, claim_id, open_new=open_new)
        record_promotion(connection, chosen.trial_id, chosen.rung)
        return Claim(chosen.trial_id, taken.number, taken.attempt)

    def has_trials_left(self, *, open_new: bool = True) -> bool:
        """Return whether a trial can be claimed or is running, by one transaction without retries.

        Args:
            open_new: whether trials that were never started count, as in `claim`.
        """
        with self._engine.begin() as connection:
            return self._queue.has_trials_left(connection, open_new=open_new)

    def reclaim_expired_leases(self) -> None:
        """Release the trials of dead workers, so that the next claim can take them.

        Trials without retries left are not changed: `claim` sets them to FAIL, and its caller ends their MLflow runs.
        """
        with self._engine.begin() as connection:
            if (study := self._queue.lock_study(connection)) is not None:
                arguments = {"retries": study.retries, "back_at": self._back_at}
                end_lost_attempts(connection, self._study_id, **arguments, fail=False)

    def renew(self, claim: Claim) -> bool:
        """Extend the lease of a claim by a lease period; return False if the attempt has ended."""
        return self._set_lease(claim, self.lease)

    def expire_lease(self, claim: Claim) -> None:
        """Set the lease of a claim to expired, because this process exits without ending the attempt, which failed."""
        self._set_lease(claim, -1.0)

    def begin_training(self, claim: Claim) -> None:
        """Count a loss of the attempt from now on as one in the training."""
        if self._may_be_preempted:
            weight = claim_sql.LOSS_WEIGHT_IN_TRAINING
            arguments = {"trial": claim.trial_id, "attempt": claim.attempt, "weight": weight}
            self._database.run_autocommit(lambda connection: connection.execute(claim_sql.SET_LOSS_WEIGHT, arguments))

    def _set_lease(self, claim: Claim, seconds: float) -> bool:
        arguments = {"trial": claim.trial_id, "attempt": claim.attempt, "lease": seconds}
        with open_autocommit(self._engine) as connection:
            return connection.execute(claim_sql.SET_LEASE, arguments).rowcount == 1

    @kill_point("report")
    def report(
        self,
        claim: Claim,
        step: int,
        value: float,
        checkpoint: StoredFile | None = None,
        *,
        metrics: Sequence[float] | None = None,
        folds: Sequence[float] | None = None,
    ) -> ReportResult:
        """Write the value and the checkpoint of an epoch, and renew the lease.

        Args:
            claim: claim of the trial.
            step: the epoch, from 0; a value that was reported for this epoch before is kept.
            value: value of the metric; NaN and infinities are stored as in Optuna.
            checkpoint: checkpoint after this epoch, in addition to the previous checkpoint, which stays valid.
            metrics: values of all objectives in a multi-objective study; None in a single-objective study.
            folds: values of the metric in each fold of a cross-validation; None without folds.

        Returns:
            The result, with the conditions under which the trial may continue. If the budget has no room for the epoch,
            nothing was written.

        Raises:
            ClaimLostError: another attempt owns the trial, or the trial has ended; nothing was written.
        """
        finite, kind = encode_value(value, nan=True)
        values: dict[str, Any] = {"study": self._study_id, "finite": finite, "type": kind}
        several = {"metrics": metrics, "folds": folds}
        has_several = any(each is not None for each in several.values())
        if has_several:
            values |= {key: None if each is None else list(each) for key, each in several.items()}
        statement = report_sql.REPORT[self._metered_epochs is not None, has_several]
        row = self._write(statement, claim, step, checkpoint, **values)
        if self._metered_epochs is None:
            return ReportResult(row.stopped)
        return ReportResult(row.stopped, row.counted, row.room)

    @kill_point("record mid-epoch checkpoint")
    def record_mid_epoch_checkpoint(self, claim: Claim, epoch: int, checkpoint: StoredFile) -> None:
        """Record a checkpoint with a state within an epoch, and renew the lease.

        Args:
            claim: claim of the trial.
            epoch: the last finished epoch, from 0; -1 within the first epoch.
            checkpoint: the checkpoint, which replaces the checkpoint after `epoch`.

        Raises:
            ClaimLostError: another attempt owns the trial, or the trial has ended; nothing was written.
        """
        self._write(report_sql.RECORD_MID_EPOCH_CHECKPOINT, claim, epoch, checkpoint)

    def _write(
        self, statement: sa.TextClause, claim: Claim, step: int, checkpoint: StoredFile | None, **values: Any
    ) -> sa.Row[Any]:
        arguments = {"trial_id": claim.trial_id, "attempt": claim.attempt, "lease": self.lease, "step": step, **values}
        arguments |= vars(checkpoint) if checkpoint else {"path": None, "sha256": None, "size": None}
        row: sa.Row[Any] = self._database.fetch_rows(statement, arguments)[0]
        if not row.mine:
            raise make_claim_lost_error(self._database, claim.trial_id, claim.attempt)
        return row

    @kill_point("reach rung")
    def report_rung(
        self, claim: Claim, rung: int, value: float | Sequence[float], *, system: Mapping[str, Any] | None = None
    ) -> RungRank:
        """Record the value of a trial at a rung, and promote or pause the trial; a pause ends the attempt.

        Args:
            claim: claim of the trial.
            rung: the reached rung, from 0.
            value: best value up to the rung, not NaN; in a multi-objective study, the values of all objectives at the
                best epoch; in population-based training, the last value.
            system: system attributes to set if the trial is paused.

        Raises:
            ClaimLostError: another attempt owns the trial, or the trial has ended; nothing was written.
        """
        rungs = self._rungs
        assert rungs is not None

        def record_value(connection: sa.Connection, repeated: bool) -> RungRank | None:
            study = self._queue.lock_study(connection)
            place = (connection, claim.trial_id, claim.attempt)
            mine = {"trial_id": claim.trial_id, "attempt": claim.attempt}
            if study is None or connection.execute(claim_sql.CHECK_OWNERSHIP, mine).one_or_none() is None:
                # The first try may have paused the trial, and its reply was lost.
                if repeated and has_ended_as(*place, Outcome.PAUSED.value):
                    return replace(read_rung_rank(connection, claim.trial_id, rungs, rung), is_promoted=False)
                return None
            at_rung = {"rung": rung, "value": value, "n_trials": study.n_trials}
            record_rung_value(connection, self._study_id, claim.trial_id, rungs, **at_rung)
            at = read_rung_rank(connection, claim.trial_id, rungs, rung)
            if (
                at.is_promoted
                and rungs.decide is None
                and not self._queue.has_budget_to_continue(connection, claim.trial_id, rung, study.n_trials)
            ):
                at = replace(at, is_promoted=False)
            if at.is_promoted:
                record_promotion(connection, claim.trial_id, rung)
            else:
                paused = {"rung": rung, "epoch": rungs.epochs[rung] - 1, "rank": at.rank, "reached": at.reached_count}
                finishing.finish_attempt(*place, Outcome.PAUSED, attrs={RUNG: paused}, system=system)
            return at

        if (found := self._database.run_transaction(record_value)) is None:
            raise make_claim_lost_error(self._database, claim.trial_id, claim.attempt)
        return found

    @kill_point("record outcome")
    def finish_attempt(
        self,
        claim: Claim,
        outcome: Outcome,
        *,
        retry: bool = False,
        value: float | Sequence[float] | None = None,
        attrs: Mapping[str, Any] | None = None,
        system: Mapping[str, Any] | None = None,
    ) -> None:
        """End the attempt; the trial ends too, unless it is released.

        Args:
            claim: claim of the trial.
            outcome: outcome of the attempt.
            retry: whether to release the trial for another attempt; the outcome RELEASED always releases it.
            value: value of a COMPLETE or PRUNED trial; in a multi-objective study, one value per objective.
            attrs: user attributes to set in the same transaction.
            system: system attributes to set in the same transaction.

        Raises:
            ClaimLostError: another attempt owns the trial, or the trial has ended; nothing was written.
        """

        def end_attempt(connection: sa.Connection) -> bool:
            place = (connection, claim.trial_id, claim.attempt)
            # A retry finds an attempt that the first call has ended, if only the reply of that call was lost.
            return finishing.finish_attempt(
                *place, outcome, retry=retry, value=value, attrs=attrs, system=system
            ) or has_ended_as(*place, outcome.value)

        if not self._database.run_autocommit(end_attempt):
            raise make_claim_lost_error(self._database, claim.trial_id, claim.attempt)

    def count_failures(self, claim: Claim) -> int:
        """Return the number of lost and failed attempts from the last attempt that added a checkpoint on."""
        return int(self._database.fetch_rows(claim_sql.COUNT_FAILURES, {"trial": claim.trial_id})[0].failures)

    def release(self, claim: Claim) -> None:
        """After the claim was lost, end the attempt as CANCELLED if it is still live."""
        self._database.run_autocommit(
            lambda connection: finishing.close_attempt(connection, claim.trial_id, claim.attempt, Outcome.CANCELLED)
        )
