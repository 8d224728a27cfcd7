"""A worker: claim a trial, run it, settle it, take the next, until the budget is spent or it is told to stop."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import optuna
from sqlalchemy.exc import SQLAlchemyError

from objectives import Objective, ObjectiveError
from objectives.training import DeviceMemoryError, FitResult, NonFiniteError, Trainer
from search.entry import EXIT_DRAINED, EXIT_GAVE_UP
from search.pruning import Judge
from search.sampling.samplers import training_seed
from search.sampling.suggest import suggest
from search.study.checkpoints import StudyCheckpoints
from search.study.folders import open_attempt_dir, remove_earlier, runs_folder
from search.study.study import StoredStudy
from search.tracking.tracker import Tracker
from search.tracking.trial_run import TrialTracking
from search.worker.session import TrialSession
from storage.attributes import INFEASIBLE, PRUNING, REASON, STARTED_AT, TRACKING
from storage.errors import CheckpointStoreError
from storage.mlflow.client import State
from storage.study_storage.opening import engine_of
from storage.trials.claims import LEASE, Claim, ClaimLostError, Claims, Lost, Nothing, Stopped
from storage.trials.lease import LeaseKeeper
from storage.trials.settling import Outcome

log = logging.getLogger(__name__)

# A bug in an objective fails every trial: without an end to it, a night's budget is gone in a minute.
FAILURES_IN_A_ROW = 3

SERVICE_ERRORS = (SQLAlchemyError, optuna.exceptions.StorageInternalError)


def worker_name(pid: int | None = None) -> str:
    """Return what tells a worker of this host from all others: ``host:pid``, by default this process's."""
    return f"{socket.gethostname()}:{pid or os.getpid()}"


class Worker:
    """Runs trials of one study in this process."""

    def __init__(
        self,
        study: StoredStudy,
        objective: Objective,
        *,
        tracker: Tracker,
        runs_dir: Path,
        checkpoints: StudyCheckpoints,
        stop: threading.Event,
        fleet_gone: Callable[[], bool] = lambda: False,
        device: str | None = None,
        lease: float = LEASE,
    ) -> None:
        self._study = study
        self._spec = study.spec
        self._optuna_study = study.open()
        self._judge = Judge(study.spec, study.storage, study.study_id, max_age=1.0)
        self._objective = objective
        self._claims = Claims(engine_of(study.storage), study.study_id, worker=worker_name(), lease=lease)
        self._lease = LeaseKeeper(self._claims)
        self._tracker = tracker
        self._runs_dir = runs_folder(runs_dir, study)
        self._checkpoints = checkpoints
        self._stop = stop
        self._fleet_gone = fleet_gone
        self._device = device
        self._session: TrialSession | None = None  # of the attempt that runs, or ran last
        self._idle = 0  # times that there was nothing to claim, in a row
        self._failures = 0
        self._last_failure = ""

    def work(self) -> int:
        """Run trials until none is left, this process is told to stop, or the objective keeps failing.

        Returns:
            The process's exit code: 0, ``EXIT_DRAINED`` or ``EXIT_GAVE_UP``.
        """
        with self._lease:
            while not self._stopping():
                got = self._claims.claim(open_new=not self._out_of_time())
                if isinstance(got, Stopped):
                    log.info("the study was stopped: %s", got.why)
                    return EXIT_DRAINED
                if isinstance(got, Lost):
                    log.error("trial %d: FAIL, %s", got.number, got.reason)
                    self._tracker.lost(got, at=int(time.time() * 1000))
                    self._failures, self._last_failure = self._failures + 1, got.reason
                    if self._hopeless():
                        return self._give_up()
                elif isinstance(got, Nothing):
                    if not got.running:
                        return 0
                    self._wait()
                else:
                    self._idle = 0
                    self._run(got)
                    if self._hopeless():
                        return self._give_up()
        return EXIT_DRAINED

    def _hopeless(self) -> bool:
        return self._failures >= FAILURES_IN_A_ROW and not self._any_finished()

    def _give_up(self) -> int:
        log.error(
            "giving up: %d trials in a row failed and none has finished; the last: %s",
            self._failures,
            self._last_failure,
        )
        return EXIT_GAVE_UP

    def _wait(self) -> None:
        """Wait a moment while others run trials: when one of them dies, its trial is there to take."""
        self._stop.wait(min(0.5 * 1.5**self._idle, 5.0))
        self._idle += 1

    def _stopping(self) -> bool:
        if not self._stop.is_set() and self._fleet_gone():
            log.warning("the fleet that started this worker is gone: stopping")
            self._stop.set()
        return self._stop.is_set()

    def _out_of_time(self) -> bool:
        started = self._study.attrs.get(STARTED_AT)
        if self._spec.timeout is None or started is None:
            return False
        return time.time() >= float(started) + self._spec.timeout

    def _any_finished(self) -> bool:
        finished = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
        return any(t.state in finished for t in self._study.trials())

    def _run(self, claim: Claim) -> None:
        """Run one trial to its end, or to where it is given back."""
        log.info("trial %d: attempt %d", claim.number, claim.attempt)
        try:
            run_dir = open_attempt_dir(self._runs_dir, claim)
        except OSError as error:  # a full disk costs no attempt
            self._claims.settle(claim, "WAITING", "released")
            raise CheckpointStoreError(f"{self._runs_dir}: no run directory can be made: {error.strerror}") from error
        tracked = TrialTracking(self._tracker, self._spec, claim, self._study.storage)
        try:
            with self._lease.hold(claim), self._study.storage.owned(claim.trial_id, claim.attempt):
                self._attempt(claim, tracked, run_dir)
        except ClaimLostError as lost:
            log.warning("%s: letting go of it", lost)
            self._claims.let_go(claim)
            if self._session is not None:
                self._session.kept.abandon()
            tracked.abandon(str(lost))

    def _attempt(self, claim: Claim, tracked: TrialTracking, run_dir: Path) -> None:
        session = self._session = None
        try:
            tracked.open()
            config = suggest(self._objective, self._optuna_study, claim, self._spec)
            tracked.log_params()
            self._session = session = TrialSession(
                run_dir,
                storage=self._study.storage,
                claim=claim,
                claims=self._claims,
                checkpoints=self._checkpoints,
                metric=f"val_{self._spec.metric}",
                last_epoch=self._spec.epochs - 1,
                log_epoch=tracked.log_epoch,
                stopping=self._stopping,
                judge=self._judge,
            )
            result = Trainer(
                self._objective,
                config,
                epochs=self._spec.epochs,
                seed=training_seed(self._spec, claim.number),
                split_seed=self._spec.seed,
                session=session,
                run_dir=run_dir,
                device=self._device,
            ).fit()
        except NonFiniteError as error:
            assert session is not None
            session.report_non_finite(error.epoch)
            self._infeasible(claim, tracked, str(error), session.last_value)
        except DeviceMemoryError as error:
            if not self._again(claim, tracked, "memory", str(error)):
                self._infeasible(claim, tracked, str(error), session.last_value if session else None)
        except CheckpointStoreError:
            self._claims.settle(claim, "WAITING", "released")
            tracked.leave()
            raise
        except (ClaimLostError, *SERVICE_ERRORS):
            raise
        except (Exception, SystemExit) as error:  # whatever the user's code raises ends its trial, not the worker
            self._fail(claim, tracked, error, run_dir)
        else:
            self._settle(claim, tracked, result, session)

    def _settle(self, claim: Claim, tracked: TrialTracking, result: FitResult, session: TrialSession) -> None:
        if result.status == "stopped":
            self._claims.settle(claim, "WAITING", "released")
            tracked.leave()
            log.info("trial %d: given back after epoch %d", claim.number, len(result.history))
            return
        self._failures = 0
        state: State
        decision = session.decision if result.status == "pruned" else None
        session.keep_best()
        kept = tracked.publish(result, session.files)
        if decision is not None:
            state, reason, grounds = "PRUNED", decision.reason, decision.record()
            tracked.tag_pruning(grounds)
            self._end(claim, tracked, state, "pruned", reason, value=session.last_value, attrs={PRUNING: grounds})
        else:
            state, reason = "COMPLETE", self._best(result)
            self._end(claim, tracked, state, "complete", reason, value=result.best_value)
        tracked.finish(state, reason, kept=kept)
        session.forget(but_last=kept)
        remove_earlier(self._runs_dir, claim)

    def _best(self, result: FitResult) -> str:
        return f"best {self._spec.metric} {result.best_value:.6g} at epoch {result.best_epoch + 1}"

    def _infeasible(self, claim: Claim, tracked: TrialTracking, reason: str, last: float | None) -> None:
        """Settle as PRUNED, which the sampler learns from, a configuration that diverged or does not fit."""
        self._failures = 0
        self._end(claim, tracked, "PRUNED", "infeasible", reason, value=last, attrs={INFEASIBLE: True})
        tracked.finish("INFEASIBLE", reason)

    def _fail(self, claim: Claim, tracked: TrialTracking, error: BaseException, run_dir: Path) -> None:
        reason = self._last_failure = " ".join(_as_text(f"{type(error).__name__}: {error}").split())
        if not isinstance(error, ObjectiveError):
            log.error("trial %d failed\n%s", claim.number, traceback.format_exc())
            with contextlib.suppress(OSError):  # a full disk must not hide why the trial failed
                (run_dir / "error.txt").write_text(_as_text(traceback.format_exc()), encoding="utf-8")
                tracked.log_file(run_dir / "error.txt")
        if not self._again(claim, tracked, "error", reason):
            self._failures += 1
            self._end(claim, tracked, "FAIL", "failed", reason)
            tracked.finish("FAIL", reason)

    def _again(self, claim: Claim, tracked: TrialTracking, kind: str, reason: str) -> bool:
        """Give the trial back for another attempt, where the spec allows one after such an end."""
        if kind not in self._spec.retry_on or self._claims.failures(claim) >= self._spec.retries:
            return False
        self._claims.settle(claim, "WAITING", "failed", attrs={REASON: reason})
        tracked.leave()
        log.warning("trial %d: given back after %s", claim.number, reason)
        return True

    def _end(
        self,
        claim: Claim,
        tracked: TrialTracking,
        state: str,
        outcome: Outcome,
        reason: str,
        *,
        value: float | None = None,
        attrs: dict[str, object] | None = None,
    ) -> None:
        # What `study.tell` does, but for the sampler's `after_trial`, which has nothing to do without constraints.
        attrs = {REASON: reason, TRACKING: tracked.pending(), **(attrs or {})}
        self._claims.settle(claim, state, outcome, value=value, attrs=attrs)
        log.info("trial %d: %s, %s", claim.number, state, reason)


def _as_text(message: str) -> str:
    """Return what an exception says without what neither a file nor a database takes: NUL, and halves of characters."""
    return message.replace("\0", "").encode("utf-8", "backslashreplace").decode()
