"""A worker: claim a trial, run it, take the next, until the budget is spent or it is told to stop."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import optuna

from hpsearch.objectives.objective import BaseObjective
from hpsearch.search.process import EXIT_DONE, EXIT_DRAINED, EXIT_GAVE_UP, GracefulShutdown
from hpsearch.search.pruners.study_pruner import StudyPruner, study_rungs
from hpsearch.search.samplers.known_trials import as_sampled
from hpsearch.search.study.checkpoints import StudyCheckpoints
from hpsearch.search.study.stop_when import Rest
from hpsearch.search.study.study import StoredStudy, runs_folder
from hpsearch.search.tracking.tracker import Tracker
from hpsearch.search.worker.attempt import SERVICE_ERRORS, Attempt, WorkerContext
from hpsearch.search.worker.identity import worker_name
from hpsearch.search.worker.watchdog import Pulse
from hpsearch.storage.attributes import RUNG
from hpsearch.storage.trials import LEASE
from hpsearch.storage.trials.claims import Claim, Claims, Lost, Nothing, Retired, Stopped
from hpsearch.storage.trials.history import read_epoch_values
from hpsearch.storage.trials.lease import LeaseKeeper
from hpsearch.storage.trials.register import Register
from hpsearch.storage.trials.settle import Ended, Outcome

log = logging.getLogger(__name__)

# A bug in an objective fails every trial: without an end to it, a night's budget is gone in a minute.
ENOUGH_FAILURES = 3  # of the whole fleet since it began


class Worker:
    """Runs trials of one study in this process."""

    def __init__(  # noqa: PLR0913 what one process is told, by keyword
        self,
        study: StoredStudy,
        objective: BaseObjective,
        *,
        tracker: Tracker,
        runs_dir: Path,
        checkpoints: StudyCheckpoints,
        shutdown: GracefulShutdown,
        pulse: Pulse,
        register: Register,
        save_every: float | None = None,
        leave_when_idle: float | None = None,
        max_trials: int | None = None,
        failed_before: int | None = None,
        fleet_gone: Callable[[], bool] = lambda: False,
        device: str | None = None,
        lease: float = LEASE,
    ) -> None:
        rungs = study_rungs(study.spec)
        metered = study.spec.epochs if study.spec.metered else None
        claims = Claims(study.engine, study.study_id, worker=worker_name(), lease=lease, rungs=rungs, metered=metered)
        self._context = WorkerContext(
            study=study,
            sampled=as_sampled(study.open(), partial(read_epoch_values, study.engine, study.study_id)),
            objective=objective,
            claims=claims,
            lease=LeaseKeeper(claims),
            pruner=StudyPruner(study.spec, study.storage, study.study_id, max_age=1.0),
            rungs=rungs,
            tracker=tracker,
            checkpoints=checkpoints,
            runs_dir=runs_folder(runs_dir, study),
            stopping=self._stopping,
            shutdown=shutdown,
            pulse=pulse,
            save_every=save_every,
            device=device,
        )
        self._rest = None if study.spec.stop_when is None else Rest(study, self._context.sampled)
        self._shutdown, self._pulse, self._register = shutdown, pulse, register
        self._fleet_gone = fleet_gone
        self._leave_when_idle = leave_when_idle
        self._left = max_trials  # to run
        self._idle = 0  # times that there was nothing to claim, in a row
        self._idle_since = math.inf
        self._failed_before = failed_before  # trials, when this worker or its fleet began

    def work(self) -> int:
        """Run trials until none is left, this process is told to stop, or the objective keeps failing.

        Returns:
            The process's exit code: ``EXIT_DONE``, ``EXIT_DRAINED`` or ``EXIT_GAVE_UP``.
        """
        if self._failed_before is None:
            self._failed_before = len(self._failed())
        with self._context.lease:
            while not self._stopping() and self._left != 0:
                self._pulse.beat()
                self._register.seen()
                ended: Ended | None
                if self._rest is not None and (given_up := self._rest.given_up()):
                    log.info("no new trial is begun: %s", given_up.why)
                match self._context.claims.claim(open_new=not self._context.study.out_of_time):
                    case Stopped(why):
                        log.info("the study was stopped: %s", why)
                        return EXIT_DONE
                    case Nothing(running=0):
                        return EXIT_DONE
                    case Nothing(running=running):
                        if self._idle_too_long(running):
                            return EXIT_DONE
                        self._wait()
                        continue
                    case Retired() as retired:
                        ended = self._retired(retired)
                    case Lost() as lost:
                        ended = self._lost(lost)
                    case Claim() as claim:
                        self._idle, self._idle_since = 0, math.inf
                        ended = Attempt(self._context, claim).run()
                        self._left = None if self._left is None else self._left - 1
                if ended is not None and ended.outcome.trial_state == "FAIL" and self._hopeless(ended):
                    return EXIT_GAVE_UP
        return EXIT_DRAINED if self._any_left() else EXIT_DONE

    def _any_left(self) -> bool:
        """Whether there is a reason to start a worker again; a database that does not answer is one."""
        try:
            return self._context.claims.any_left(open_new=not self._context.study.out_of_time)
        except SERVICE_ERRORS:
            return True

    def _lost(self, lost: Lost) -> Ended:
        log.error("trial %d: FAIL, %s", lost.number, lost.reason)
        self._context.tracker.settled(lost)
        return Ended(Outcome.LOST, lost.reason)

    def _retired(self, retired: Retired) -> Ended:
        """Tell of a trial that waited in vain, and remove what it would have gone on from where it never will."""
        log.info("trial %d: PRUNED, %s", retired.number, retired.reason)
        self._context.tracker.settled(retired)
        if not retired.cut:
            self._context.checkpoints.forget_trial(retired.number)
        return Ended(Outcome.PRUNED, retired.reason)

    def _hopeless(self, last: Ended) -> bool:
        """Whether trials only fail, whichever worker runs them: another would as well."""
        failed = len(self._failed()) - (self._failed_before or 0)
        if failed < ENOUGH_FAILURES or self._any_finished():
            return False
        log.error("giving up: %d trials failed and none has finished; the last: %s", failed, last.reason)
        return True

    def _failed(self) -> list[optuna.trial.FrozenTrial]:
        return [t for t in self._context.study.trials() if t.state == optuna.trial.TrialState.FAIL]

    def _any_finished(self) -> bool:
        finished = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
        return any(t.state in finished or RUNG in t.user_attrs for t in self._context.study.trials())

    def _idle_too_long(self, running: int) -> bool:
        self._idle_since = min(self._idle_since, time.monotonic())
        idle = time.monotonic() - self._idle_since
        if self._leave_when_idle is None or idle < self._leave_when_idle:
            return False
        log.info("nothing to take for %.0f s, while others run %d trials: leaving", idle, running)
        return True

    def _wait(self) -> None:
        """Wait a moment while others run trials: when one of them dies, its trial is there to take."""
        until = time.monotonic() + min(0.5 * 1.5**self._idle, 5.0)
        while not self._shutdown.has_begun and time.monotonic() < until:
            time.sleep(0.1)  # asked again, rather than woken: a signal's handler may take no lock
        self._idle += 1

    def _stopping(self) -> bool:
        if not self._shutdown.has_begun and self._fleet_gone():
            log.warning("the fleet that started this worker is gone: stopping")
            self._shutdown.begin()
        return self._shutdown.has_begun
