"""The loop of a worker: claim a trial, run it, repeat until the budget is spent or the worker is stopped."""

from __future__ import annotations

import logging
import math
import time

import optuna

from hpsearch.search.process import EXIT_DONE, EXIT_DRAINED, EXIT_GAVE_UP
from hpsearch.search.study.terminator import Terminator
from hpsearch.search.worker.attempt import SERVICE_ERRORS, Attempt
from hpsearch.search.worker.context import WorkerContext
from hpsearch.storage.attributes import RUNG
from hpsearch.storage.trials.claims import Claim, NoTrialAvailable, PrunedTrial, RetriesExhausted, StudyStopped
from hpsearch.storage.trials.finishing import Outcome, TrialEnd

log = logging.getLogger(__name__)

# A bug in the objective fails every trial; without a limit, it would use up the budget in minutes.
MAX_FAILURES = 3  # of the fleet since its start


class Worker:
    """Loop over the trials of one study."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._terminator = (
            None if context.spec.min_expected_gain is None else Terminator(context.study, context.sampled)
        )
        self._left = context.options.max_trials  # to run
        self._idle = 0  # times that there was nothing to claim, in a row
        self._idle_since = math.inf
        self._failed_before = context.failed_at_start  # trials, when this worker or its fleet began

    def work(self) -> int:
        """Run trials until none is left, this process is told to stop, or the objective keeps failing.

        Returns:
            The process's exit code: ``EXIT_DONE``, ``EXIT_DRAINED`` or ``EXIT_GAVE_UP``.
        """
        if self._failed_before is None:
            self._failed_before = len(self._failed())
        with self._context.lease:
            while not self._context.is_stopping() and self._left != 0:
                self._context.watchdog.beat()
                self._context.registration.send_heartbeat()
                ended: TrialEnd | None
                if self._terminator is not None and (given_up := self._terminator.stop_early()):
                    log.info("no new trial is begun: %s", given_up.reason)
                match self._context.claims.claim(open_new=not self._context.study.is_timed_out):
                    case StudyStopped(why):
                        log.info("the study was stopped: %s", why)
                        return EXIT_DONE
                    case NoTrialAvailable(running=0):
                        return EXIT_DONE
                    case NoTrialAvailable(running=running):
                        if self._idle_too_long(running):
                            return EXIT_DONE
                        self._wait()
                        continue
                    case PrunedTrial() as retired:
                        ended = self._retired(retired)
                    case RetriesExhausted() as lost:
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
            return self._context.claims.has_trials_left(open_new=not self._context.study.is_timed_out)
        except SERVICE_ERRORS:
            return True

    def _lost(self, lost: RetriesExhausted) -> TrialEnd:
        log.error("trial %d: FAIL, %s", lost.number, lost.reason)
        self._context.tracker.end_run_without_worker(lost)
        return TrialEnd(Outcome.LOST, lost.reason)

    def _retired(self, retired: PrunedTrial) -> TrialEnd:
        """Tell of a trial that waited in vain, and remove what it would have gone on from where it never will."""
        log.info("trial %d: PRUNED, %s", retired.number, retired.reason)
        self._context.tracker.end_run_without_worker(retired)
        if not retired.is_cut:
            self._context.checkpoints.delete_trial(retired.number)
        return TrialEnd(Outcome.PRUNED, retired.reason)

    def _hopeless(self, last: TrialEnd) -> bool:
        """Whether trials only fail, whichever worker runs them: another would as well."""
        failed = len(self._failed()) - (self._failed_before or 0)
        if failed < MAX_FAILURES or self._any_finished():
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
        patience = self._context.options.idle_timeout
        if patience is None or idle < patience:
            return False
        log.info("no trial to claim for %.0f s, while other workers run %d trials; exiting", idle, running)
        return True

    def _wait(self) -> None:
        """Wait a moment while others run trials: when one of them dies, its trial is there to take."""
        until = time.monotonic() + min(0.5 * 1.5**self._idle, 5.0)
        while not self._context.shutdown.has_begun and time.monotonic() < until:
            time.sleep(0.1)  # asked again, rather than woken: a signal's handler may take no lock
        self._idle += 1
