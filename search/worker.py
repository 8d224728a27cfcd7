"""A worker: claim a trial, run it, settle it, take the next, until the budget is spent or it is told to stop."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import threading
import time
import traceback
from pathlib import Path

import optuna
from sqlalchemy.exc import SQLAlchemyError

from objectives import Objective, ObjectiveError
from objectives.training import DeviceMemoryError, FitResult, NonFiniteError, Trainer
from search.samplers import derive_seed, make_sampler
from search.session import TrialSession
from search.study import RUN_ID, STARTED_AT, StudyHandle
from search.trial_tracking import TrialTracking, end_lost_run
from storage.claims import REASON, Claim, ClaimLostError, Claims, Lost, Nothing
from storage.locks import AdvisoryLocks
from storage.tracking import State, Tracking

log = logging.getLogger(__name__)

INFEASIBLE = "hpsearch:infeasible"

# Exit codes of a worker beside 0 (nothing left), 1 (an error of ours or of a service) and 2 (a mistake of the user's).
EXIT_GAVE_UP = 3
EXIT_DRAINED = 128 + 15

# A bug in an objective fails every trial: without an end to it, a night's budget is gone in a minute.
FAILURES_IN_A_ROW = 3

SERVICE_ERRORS = (SQLAlchemyError, optuna.exceptions.StorageInternalError)


def worker_name(pid: int | None = None) -> str:
    """Return what tells a worker of this host from all others: ``host:pid``, by default this process's."""
    return f"{socket.gethostname()}:{pid or os.getpid()}"


def runs_folder(runs_dir: Path, study: StudyHandle) -> Path:
    """Return the folder of a study's run directories on this machine."""
    return runs_dir / study.folder


class Worker:
    """Runs trials of one study in this process."""

    def __init__(
        self,
        study: StudyHandle,
        objective: Objective,
        *,
        locks: AdvisoryLocks,
        tracking: Tracking,
        runs_dir: Path,
        stop: threading.Event,
        fleet_pid: int | None = None,
        device: str | None = None,
    ) -> None:
        self._handle = study
        self._spec = study.spec
        self._study = study.open()
        self._objective = objective
        self._claims = Claims(study.storage, study.study_id, locks, worker=worker_name())
        self._tracking = tracking
        self._parent_run = str(study.attrs[RUN_ID])
        self._runs_dir = runs_folder(runs_dir, study)
        self._stop = stop
        self._fleet_pid = fleet_pid
        self._device = device
        self._failures = 0
        self._last_failure = ""

    def work(self) -> int:
        """Run trials until none is left, this process is told to stop, or the objective keeps failing.

        Returns:
            The process's exit code: 0, ``EXIT_DRAINED`` or ``EXIT_GAVE_UP``.
        """
        while not self._stopping():
            got = self._claims.claim(
                n_trials=self._spec.n_trials, retries=self._spec.retries, open_new=not self._out_of_time()
            )
            if isinstance(got, Claim):
                self._run(got)
                if self._failures >= FAILURES_IN_A_ROW and not self._any_finished():
                    log.error(
                        "giving up: %d trials in a row failed and none has finished; the last: %s",
                        self._failures,
                        self._last_failure,
                    )
                    return EXIT_GAVE_UP
            elif isinstance(got, Lost):
                log.error("trial %d: FAIL, %s", got.number, got.reason)
                end_lost_run(self._tracking, got)
            elif self._nothing_left(got):
                return 0
        return EXIT_DRAINED

    def _nothing_left(self, nothing: Nothing) -> bool:
        """Wait a moment while others run trials: when one of them dies, its trial is there to take."""
        if nothing.running:
            self._stop.wait(1.0)
        return nothing.running == 0

    def _stopping(self) -> bool:
        if self._fleet_pid is not None and os.getppid() != self._fleet_pid:
            log.warning("the fleet that started this worker is gone: stopping")
            self._stop.set()
        return self._stop.is_set()

    def _out_of_time(self) -> bool:
        started = self._handle.attrs.get(STARTED_AT)
        if self._spec.timeout is None or started is None:
            return False
        return time.time() >= float(started) + self._spec.timeout

    def _any_finished(self) -> bool:
        finished = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
        return any(t.state in finished for t in self._handle.trials())

    def _run(self, claim: Claim) -> None:
        """Run one trial to its end, or to where it is given back."""
        log.info("trial %d: attempt %d", claim.number, claim.attempt)
        run_dir = self._runs_dir / f"{claim.number:04d}"
        if not claim.resumed:
            shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.mkdir(parents=True, exist_ok=True)
        self._study.sampler = make_sampler(self._spec.sampler, study_seed=self._spec.seed, trial_number=claim.number)
        trial = optuna.Trial(self._study, claim.trial_id)
        tracked = TrialTracking(self._tracking, self._spec, claim, trial, parent=self._parent_run)
        try:
            self._attempt(claim, trial, tracked, run_dir)
        except ClaimLostError as lost:
            log.warning("%s: letting go of it", lost)
            self._claims.let_go(claim)
            tracked.abandon(str(lost))

    def _attempt(self, claim: Claim, trial: optuna.Trial, tracked: TrialTracking, run_dir: Path) -> None:
        session: TrialSession | None = None
        try:
            tracked.open()
            config = self._objective.configure(trial)
            tracked.log_params()
            session = TrialSession(
                run_dir,
                trial=trial,
                claim=claim,
                claims=self._claims,
                metric=f"val_{self._spec.metric}",
                last_epoch=self._spec.epochs - 1,
                run=tracked.run,
                stopping=self._stopping,
            )
            result = Trainer(
                self._objective,
                config,
                epochs=self._spec.epochs,
                seed=derive_seed(self._spec.seed, "trial", claim.number),
                split_seed=self._spec.seed,
                session=session,
                run_dir=run_dir,
                device=self._device,
            ).fit()
        except NonFiniteError as error:
            assert session is not None
            session.report_non_finite(error.epoch)
            self._infeasible(claim, trial, tracked, str(error))
        except DeviceMemoryError as error:
            self._infeasible(claim, trial, tracked, str(error))
        except (ClaimLostError, *SERVICE_ERRORS):
            raise
        except (Exception, SystemExit) as error:  # whatever the user's code raises ends its trial, not the worker
            self._fail(claim, trial, tracked, error, run_dir)
        else:
            self._settle(claim, trial, tracked, result, session)

    def _settle(
        self, claim: Claim, trial: optuna.Trial, tracked: TrialTracking, result: FitResult, session: TrialSession
    ) -> None:
        if result.status == "stopped":
            self._claims.give_back(claim)
            tracked.leave()
            log.info("trial %d: given back after epoch %d", claim.number, len(result.history))
            return
        self._failures = 0
        pruned = result.status == "pruned"
        state: State = "PRUNED" if pruned else "COMPLETE"
        reason = self._why_pruned(result) if pruned else self._best(result)
        tracked.publish(result, session.files, with_model=not pruned)
        self._tell(claim, trial, state, reason, None if pruned else result.best_value)
        tracked.finish(state, reason)
        session.forget()

    def _best(self, result: FitResult) -> str:
        return f"best {self._spec.metric} {result.best_value:.6g} at epoch {result.best_epoch + 1}"

    def _why_pruned(self, result: FitResult) -> str:
        last, metric = result.history[-1], self._spec.metric
        at = f"epoch {last.epoch + 1} of {self._spec.epochs}"
        return f"{self._spec.pruner.name} pruner at {at}: {metric} {last.metrics[f'val_{metric}']:.6g}"

    def _infeasible(self, claim: Claim, trial: optuna.Trial, tracked: TrialTracking, reason: str) -> None:
        """Settle as PRUNED, which the sampler learns from, a configuration that diverged or does not fit."""
        self._failures = 0
        trial.set_user_attr(INFEASIBLE, True)
        self._tell(claim, trial, "PRUNED", reason)
        tracked.finish("INFEASIBLE", reason)

    def _fail(
        self, claim: Claim, trial: optuna.Trial, tracked: TrialTracking, error: BaseException, run_dir: Path
    ) -> None:
        self._failures += 1
        reason = self._last_failure = " ".join(f"{type(error).__name__}: {error}".split())
        if not isinstance(error, ObjectiveError):
            log.error("trial %d failed\n%s", claim.number, traceback.format_exc())
            (run_dir / "error.txt").write_text(traceback.format_exc())
            tracked.log_file(run_dir / "error.txt")
        self._tell(claim, trial, "FAIL", reason)
        tracked.finish("FAIL", reason)

    def _tell(self, claim: Claim, trial: optuna.Trial, state: str, reason: str, value: float | None = None) -> None:
        with self._claims.last_word(claim):
            trial.set_user_attr(REASON, reason)
            self._study.tell(trial, value, state=optuna.trial.TrialState[state])
        log.info("trial %d: %s, %s", claim.number, state, reason)
