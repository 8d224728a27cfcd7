"""Claim a trial and write to it under a lease and a fencing token."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from hpsearch.kill_points import kill_point
from hpsearch.storage.attributes import ATTEMPT, CUT, PRUNING, REASON, RUNG, WORKER
from hpsearch.storage.database.connect import each_committed
from hpsearch.storage.database.retry import PATIENCE
from hpsearch.storage.database.statements import Database
from hpsearch.storage.database.trial_rows import claim_lost, store
from hpsearch.storage.errors import ClaimLostError, StorageError
from hpsearch.storage.rungs.rungs import (
    Retired,
    Rungs,
    Standing,
    next_promoted,
    next_retired,
    next_to_the_end,
    note,
    promote,
    standing,
)
from hpsearch.storage.trials import LEASE
from hpsearch.storage.trials import claim_sql as sql
from hpsearch.storage.trials import settle as settling
from hpsearch.storage.trials.budget import Spending, spending_in
from hpsearch.storage.trials.process_identity import current_machine, current_process, has_ended
from hpsearch.storage.trials.settle import Outcome

if TYPE_CHECKING:
    from hpsearch.storage.checkpoints.store import Stored


@dataclass(frozen=True)
class Claim:
    """The right to run one trial."""

    trial_id: int
    number: int
    attempt: int

    @property
    def resumed(self) -> bool:
        """Whether the trial has been started before."""
        return self.attempt > 1


@dataclass(frozen=True)
class Lost:
    """A trial that was settled as FAIL just now, because too many of its workers died."""

    trial_id: int
    number: int
    attempt: int
    reason: str


@dataclass(frozen=True)
class Nothing:
    """No trial to take now. With `running` trials of others, one may yet come back; with none, the study is done."""

    running: int


@dataclass(frozen=True)
class Stopped:
    """The study was stopped: nothing is handed out until it is started again."""

    why: str


@dataclass(frozen=True)
class Reported:
    """What a report is answered with.

    Attributes:
        stopped: whether the study was stopped: the trial is to be given back.
        counted: whether the epoch was written; not when the study's budget in epochs was spent before.
        room: whether the study's budgets in epochs and seconds have room for the trial's next epoch.
    """

    stopped: bool
    counted: bool = True
    room: bool = True


__all__ = ["Claim", "ClaimLostError", "Claims", "Lost", "Nothing", "Reported", "Retired", "Stopped"]


class Claims:
    """Claims of one worker in one study.

    Args:
        engine: of the study's database.
        study_id: the study; its spec, with budget and retries, is read from the database at every claim.
        worker: who claims, for a person to read.
        lease: seconds without a sign of life after which another worker may take a trial over.
        patience: seconds to wait for a database that does not answer.
        rungs: at which trials of the study wait, if they do.
        metered: epochs of a full trial, where the study has a budget in epochs or seconds.
    """

    def __init__(
        self,
        engine: sa.Engine,
        study_id: int,
        *,
        worker: str,
        lease: float = LEASE,
        patience: float = PATIENCE,
        rungs: Rungs | None = None,
        metered: int | None = None,
    ) -> None:
        self._engine = engine
        self._database = Database(engine, patience)
        self._study_id = study_id
        self._worker = worker
        self._process = current_process()
        self.lease = lease
        self._rungs = rungs
        self._metered = metered
        self._choice = sql.CHOICE if rungs is None else sql.CHOICE_BUT_PAUSED
        self._back_at = -math.inf  # when the database last came back after it had been away

    def note_outage(self) -> None:
        """Take note that the database was away until now: nobody could renew, and each gets its lease anew."""
        self._back_at = time.monotonic()

    @kill_point("claim")
    def claim(self, *, open_new: bool = True) -> Claim | Lost | Retired | Nothing | Stopped:
        """Take a trial.

        Args:
            open_new: whether trials that were never started, or wait at a rung, may be taken (no, when the time is up).

        A trial that is settled here, when the answer of the commit was lost as well, is told to nobody: its run in
        MLflow is ended with the study's.

        Raises:
            StorageError: the study was deleted.
        """
        claim_id = uuid.uuid4()

        def take(connection: sa.Connection, repeated: bool) -> Claim | Lost | Retired | Nothing | Stopped:
            if repeated:  # a claim whose commit was answered by silence may be there
                self.note_outage()
                made = connection.execute(sql.MADE, {"claim": claim_id}).one_or_none()
                if made is not None:
                    return Claim(made.trial_id, made.number, made.attempt)
            return self._take(connection, claim_id, open_new=open_new)

        return self._database.transaction(take)

    @kill_point("write claim")
    def _take(
        self, connection: sa.Connection, claim_id: uuid.UUID, *, open_new: bool
    ) -> Claim | Lost | Retired | Nothing | Stopped:
        study = self._study(connection)
        if study is None:
            raise StorageError("the study was deleted")
        if study.stopped is not None:
            return Stopped(study.stopped)
        if lost := self._recover(connection, retries=study.retries):
            return lost
        row = connection.execute(self._choice, {"study": self._study_id, "n_trials": study.n_trials}).one()
        arguments = {
            "study_id": self._study_id,
            "claim": claim_id,
            "worker": self._worker,
            "process": self._process,
            "lease": self.lease,
            "keys": [ATTEMPT, WORKER],
        }
        spending = self._spending(connection)
        room = spending is None or spending.room(row.running)
        why = "the time was up" if spending is None or not spending.over else spending.why
        may_open = open_new and room and row.total - row.enqueued < row.opens
        trial_id, rung = row.given_back, None
        if trial_id is not None and spending is not None and not room and not self._is_whole(connection, trial_id):
            if row.running == 0:
                return self._cut(connection, trial_id, spending)
            trial_id = None  # others may leave it some of the budget
        if trial_id is None and self._rungs is not None:
            over = not may_open and row.running == 0
            begun = None if may_open else row.running
            if open_new and room and (waiting := self._next_waiting(connection, self._rungs, running=begun)):
                trial_id, rung = waiting
            elif retired := self._retire(connection, n_trials=study.n_trials, over=over, why=why):
                return retired
        trial_id = trial_id or (row.next_enqueued if may_open else None)
        if trial_id is not None:
            taken = connection.execute(sql.TAKE, {**arguments, "trial": trial_id}).one_or_none()
            if taken is None:  # a notebook was faster
                return self._take(connection, claim_id, open_new=open_new)
            if rung is not None:
                promote(connection, trial_id, rung)
            return Claim(trial_id, taken.number, taken.attempt)
        if may_open:
            new = connection.execute(sql.CREATE, arguments).one()
            return Claim(new.trial_id, new.number, 1)
        return Nothing(row.running)

    def _study(self, connection: sa.Connection) -> sa.Row[Any] | None:
        """Lock the study and return its budget, retries and stop; None where it was deleted."""
        return connection.execute(sql.STUDY, {"study": self._study_id}).one_or_none()

    def _next_waiting(self, connection: sa.Connection, rungs: Rungs, *, running: int | None) -> tuple[int, int] | None:
        """The trial that goes on from a rung, and which; when all were begun, the best for want of complete ones."""
        found = next_promoted(connection, self._study_id)
        if found is not None or running is None:
            return found
        return next_to_the_end(connection, self._study_id, rungs, running=running)

    def _spending(self, connection: sa.Connection) -> Spending | None:
        return None if self._metered is None else spending_in(connection, self._study_id)

    def _is_whole(self, connection: sa.Connection, trial_id: int) -> bool:
        """Whether a trial has reported all of its epochs, so that only its end is left to write."""
        return bool(connection.execute(sql.IS_WHOLE, {"trial": trial_id, "epochs": self._metered}).scalar())

    def _cut(self, connection: sa.Connection, trial_id: int, spending: Spending) -> Retired:
        """End a trial that was given back, for which nothing of the budget is left."""
        at = connection.execute(sql.CUT, {"trial": trial_id}).one()
        epochs = 0 if at.step is None else at.step + 1
        reason = f"after epoch {epochs} of {self._metered}: {spending.why}"
        settling.retire(connection, trial_id, attrs={REASON: reason, CUT: True})
        return Retired(trial_id, at.number, at.attempt, reason, {}, cut=True)

    def _retire(self, connection: sa.Connection, *, n_trials: int, over: bool, why: str) -> Retired | None:
        """End a trial that waits at a rung and will never go on, where there is one."""
        assert self._rungs is not None
        retired = next_retired(connection, self._study_id, self._rungs, n_trials=n_trials, over=over, why=why)
        if retired is not None:
            settling.retire(connection, retired.trial_id, attrs={REASON: retired.reason, PRUNING: retired.grounds})
        return retired

    def _recover(self, connection: sa.Connection, *, retries: int, fail: bool = True) -> Lost | None:
        """End the attempts of workers that died; their trials wait to be taken, or fail when it was too often."""
        suspects = {"study": self._study_id, "machine": f"{current_machine()}/"}
        for row in connection.execute(sql.SUSPECTS, suspects).all():
            expired = row.expired and time.monotonic() - self._back_at > row.lease
            if not (expired or has_ended(row.process)):
                continue
            if row.state != "RUNNING":  # ended from outside, and then its worker died
                settling.end_attempt(connection, row.trial_id, row.attempt, Outcome.CANCELLED)
            elif (failures := row.failures + 1) <= retries:
                settling.settle(connection, row.trial_id, row.attempt, Outcome.LOST, retry=True)
            elif fail:
                reason = f"lost its worker {row.worker}; {failures} attempts came to nothing"
                settling.settle(connection, row.trial_id, row.attempt, Outcome.LOST, attrs={REASON: reason})
                return Lost(row.trial_id, row.number, row.attempt, reason)
        return None

    def any_left(self, *, open_new: bool = True) -> bool:
        """Whether the study is to go on: a trial can be taken, or is run by others; asked once, for an answer at once.

        Args:
            open_new: as of `claim`.
        """
        with self._engine.begin() as connection:
            study = self._study(connection)
            if study is None or study.stopped is not None:
                return False
            row = connection.execute(self._choice, {"study": self._study_id, "n_trials": study.n_trials}).one()
            # A trial that waits at a rung is promoted, or is to be ended.
            at_rung = self._rungs and next_retired(connection, self._study_id, self._rungs, n_trials=0, over=True)
            spending = self._spending(connection)
        room = spending is None or spending.room(row.running)
        waits = open_new and room and row.total - row.enqueued < row.opens
        return bool(row.given_back or row.running or at_rung or waits)

    def sweep(self) -> None:
        """Put back the trials of workers that died, so that whoever claims next finds them.

        A trial that is out of retries stays for a claim, which says so and ends its run.
        """
        with self._engine.begin() as connection:
            study = self._study(connection)
            if study is not None:
                self._recover(connection, retries=study.retries, fail=False)

    def renew(self, claim: Claim) -> bool:
        """Extend the lease; return whether the attempt is still live."""
        return self._set_lease(claim, self.lease)

    def expire(self, claim: Claim) -> None:
        """Let the lease expire now: this process is about to end without having ended its attempt."""
        self._set_lease(claim, -1.0)

    def _set_lease(self, claim: Claim, seconds: float) -> bool:
        arguments = {"trial": claim.trial_id, "attempt": claim.attempt, "lease": seconds}
        with each_committed(self._engine) as connection:
            return connection.execute(sql.RENEW, arguments).rowcount == 1

    @kill_point("report")
    def report(
        self,
        claim: Claim,
        step: int,
        value: float,
        checkpoint: Stored | None = None,
        *,
        metrics: Sequence[float] | None = None,
    ) -> Reported:
        """Write what an epoch gave, once, and the checkpoint that goes with it; the lease is renewed besides.

        Args:
            claim: whose trial it is.
            step: the epoch, from 0; one that was reported before keeps its value.
            value: any float; NaN and infinities are stored as Optuna does.
            checkpoint: where the trial can be resumed after this epoch; the one before it is kept too.
            metrics: of a study of several, the values of all of them.

        Returns:
            Whether the trial may go on. Of an epoch that the study's budget has no room for nothing was written.

        Raises:
            ClaimLostError: the trial is no longer this worker's; nothing was written.
        """
        finite, kind = store(value, nan=True)
        values: dict[str, Any] = {"study": self._study_id, "finite": finite, "type": kind}
        if metrics is not None:
            values["metrics"] = list(metrics)
        statement = sql.REPORT[self._metered is not None, metrics is not None]
        row = self._write(statement, claim, step, checkpoint, **values)
        return Reported(row.stopped) if self._metered is None else Reported(row.stopped, row.counted, row.room)

    @kill_point("record mid-epoch checkpoint")
    def keep(self, claim: Claim, epoch: int, checkpoint: Stored) -> None:
        """Write where the trial can be resumed in the midst of an epoch; the lease is renewed besides.

        Args:
            claim: whose trial it is.
            epoch: the last one that was ended, from 0; -1 before the first.
            checkpoint: in place of that after `epoch`.

        Raises:
            ClaimLostError: the trial is no longer this worker's; nothing was written.
        """
        self._write(sql.KEEP, claim, epoch, checkpoint)

    def _write(
        self, statement: sa.TextClause, claim: Claim, step: int, checkpoint: Stored | None, **values: Any
    ) -> sa.Row[Any]:
        arguments = {"trial_id": claim.trial_id, "attempt": claim.attempt, "lease": self.lease, "step": step, **values}
        arguments |= vars(checkpoint) if checkpoint else {"path": None, "sha256": None, "size": None}
        row: sa.Row[Any] = self._database.rows(statement, arguments)[0]
        if not row.mine:
            raise claim_lost(self._database, claim.trial_id, claim.attempt)
        return row

    @kill_point("reach rung")
    def reach(
        self, claim: Claim, rung: int, value: float | Sequence[float], *, system: Mapping[str, Any] | None = None
    ) -> Standing:
        """Note what a trial has come to at a rung, once: it goes on, or its attempt ends and it waits there.

        Args:
            claim: whose trial it is.
            rung: that it has reached, from 0.
            value: its best up to there; not NaN. Of several metrics all values of its best epoch.
            system: system attributes to set where it waits.

        Raises:
            ClaimLostError: the trial is no longer this worker's; nothing was written.
        """
        rungs = self._rungs
        assert rungs is not None

        def reached(connection: sa.Connection, repeated: bool) -> Standing | None:
            study = self._study(connection)
            place = (connection, claim.trial_id, claim.attempt)
            mine = {"trial_id": claim.trial_id, "attempt": claim.attempt}
            if study is None or connection.execute(sql.MAY, mine).one_or_none() is None:
                if repeated and settling.ended_as(*place, Outcome.PAUSED):  # and the answer to it was lost
                    return replace(standing(connection, claim.trial_id, rung), promoted=False)
                return None
            at_rung = {"rung": rung, "value": value, "n_trials": study.n_trials}
            note(connection, self._study_id, claim.trial_id, rungs, **at_rung)
            at = standing(connection, claim.trial_id, rung)
            if at.promoted:
                promote(connection, claim.trial_id, rung)
            else:
                told = {"rung": rung, "epoch": rungs.epochs[rung] - 1, "rank": at.rank, "reached": at.reached}
                settling.settle(*place, Outcome.PAUSED, attrs={RUNG: told}, system=system)
            return at

        found = self._database.transaction(reached)
        if found is None:
            raise claim_lost(self._database, claim.trial_id, claim.attempt)
        return found

    @kill_point("record outcome")
    def settle(
        self,
        claim: Claim,
        outcome: Outcome,
        *,
        retry: bool = False,
        value: float | Sequence[float] | None = None,
        attrs: Mapping[str, Any] | None = None,
        system: Mapping[str, Any] | None = None,
    ) -> None:
        """End the attempt, and with it the trial, unless that is given back.

        Args:
            claim: whose trial it is.
            outcome: of the attempt.
            retry: give the trial back to whoever claims next, as RELEASED does in any case.
            value: of a COMPLETE or PRUNED trial; of several metrics one for each.
            attrs: user attributes to set with it, in the same transaction.
            system: system attributes likewise.

        Raises:
            ClaimLostError: the trial is no longer this worker's; nothing was written.
        """

        def settled(connection: sa.Connection) -> bool:
            place = (connection, claim.trial_id, claim.attempt)
            # Written already, when the answer to it was lost.
            return settling.settle(
                *place, outcome, retry=retry, value=value, attrs=attrs, system=system
            ) or settling.ended_as(*place, outcome)

        if not self._database.connected(settled):
            raise claim_lost(self._database, claim.trial_id, claim.attempt)

    def failures(self, claim: Claim) -> int:
        """Return how many attempts came to nothing, by death or error, since the last that added a checkpoint."""
        return int(self._database.rows(sql.FAILURES, {"trial": claim.trial_id})[0].failures)

    def let_go(self, claim: Claim) -> None:
        """End the attempt at a trial that was lost, whatever is left of it."""
        self._database.connected(
            lambda connection: settling.end_attempt(connection, claim.trial_id, claim.attempt, Outcome.CANCELLED)
        )


def running_now(engine: sa.Engine, study_id: int) -> int:
    """Return how many of the study's trials are run by a worker that seems alive."""
    rows = Database(engine).rows(sql.LIVE, {"study": study_id})
    return sum(not (row.expired or has_ended(row.process)) for row in rows)
