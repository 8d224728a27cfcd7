"""The loop of a worker: claim a trial, run it, repeat until the budget is spent or the worker is stopped."""

from __future__ import annotations

import logging
import math
import time
from datetime import datetime

from optuna.trial import TrialState

from hpsearch.search.process.exits import EXIT_DONE, EXIT_DRAINED, EXIT_GAVE_UP
from hpsearch.search.study.terminator import Terminator
from hpsearch.search.worker.attempt import SERVICE_ERRORS, Attempt
from hpsearch.search.worker.context import WorkerContext
from hpsearch.storage.attributes import REASON, RUNG
from hpsearch.storage.rungs.rungs import PrunedTrial
from hpsearch.storage.trials.claim_results import Claim, NoTrialAvailable, RetriesExhausted, StudyStopped
from hpsearch.storage.trials.finishing import Outcome, TrialEnd

log = logging.getLogger(__name__)

# Without limits, a bug in the objective or a lost data folder would fail all trials, and use up the budget in minutes.
MAX_FAILURES = 3  # failed trials of all workers since the start of the fleet, if no trial finished
MAX_EQUAL_FAILURES = 20  # of the last trials of all workers, with the same error
MAX_OWN_FAILURES = 5  # first trials of a worker, with the same error: its machine may lack files or a working GPU


class Worker:
    """The worker loop over the trials of a study."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._terminator = Terminator(context.study, context.sampled)
        self._trials_left = context.options.max_trials
        self._idle_claims = 0  # consecutive claims without an available trial
        self._idle_since = math.inf
        self._failed_before = context.failed_at_start  # failed trials at the start of the worker or its fleet
        self._own_trials = 0  # trials that this worker has run
        self._own_errors: set[str | None] = set()  # errors of these trials; None for one without, such as a paused one

    def run_trials(self) -> int:
        """Run trials until none is left, the worker is stopped, or all trials fail.

        Returns:
            The process's exit code: ``EXIT_DONE``, ``EXIT_DRAINED`` or ``EXIT_GAVE_UP``.
        """
        if self._failed_before is None:
            self._failed_before = self._count_failed()
        with self._context.lease:
            while not self._context.is_stopping() and self._trials_left != 0:
                self._context.watchdog.beat()
                self._context.registration.send_heartbeat()
                end: TrialEnd | None
                if early_stop := self._terminator.stop_early():
                    log.info("no new trials: %s", early_stop.reason)
                match self._context.claims.claim(open_new=not self._context.study.is_timed_out):
                    case StudyStopped(reason):
                        log.info("study stopped: %s", reason)
                        return EXIT_DONE
                    case NoTrialAvailable(running_trials=0):
                        log.info(
                            "no trial is left to run: %s", self._context.study.format_progress(self._count_finished())
                        )
                        return EXIT_DONE
                    case NoTrialAvailable(running_trials=running):
                        if self._is_idle_too_long(running):
                            return EXIT_DONE
                        self._wait()
                        continue
                    case PrunedTrial() as pruned:
                        end = self._end_pruned(pruned)
                    case RetriesExhausted() as lost:
                        end = self._end_lost(lost)
                    case Claim() as claim:
                        self._idle_claims, self._idle_since = 0, math.inf
                        end = Attempt(self._context, claim).run()
                        self._trials_left = None if self._trials_left is None else self._trials_left - 1
                        self._own_trials += 1
                        is_error = end is not None and end.outcome.trial_state == "FAIL"
                        self._own_errors.add(end.reason if end is not None and is_error else None)
                if end is not None and end.outcome.trial_state == "FAIL" and self._should_give_up(end):
                    return EXIT_GAVE_UP
        return EXIT_DRAINED if self._has_trials_left() else EXIT_DONE

    def _has_trials_left(self) -> bool:
        """Return whether trials are left, for which a worker should restart; True if the database does not answer."""
        try:
            return self._context.claims.has_trials_left(open_new=not self._context.study.is_timed_out)
        except SERVICE_ERRORS:
            return True

    def _end_lost(self, lost: RetriesExhausted) -> TrialEnd:
        log.error("trial %d: FAIL, %s", lost.number, lost.reason)
        self._context.tracker.end_run_without_worker(lost)
        return TrialEnd(Outcome.LOST, lost.reason)

    def _end_pruned(self, pruned: PrunedTrial) -> TrialEnd:
        """End the run of a waiting trial that was pruned, and delete its checkpoints.

        Checkpoints are kept if the trial was pruned because the budget was spent. The trial resumes if the budget is
        extended.
        """
        log.info("trial %d: PRUNED, %s", pruned.number, pruned.reason)
        self._context.tracker.end_run_without_worker(pruned)
        if not pruned.is_out_of_budget:
            self._context.checkpoints.delete_trial(pruned.number)
        return TrialEnd(Outcome.PRUNED, pruned.reason)

    def _should_give_up(self, last: TrialEnd) -> bool:
        """Return whether too many trials failed: with no better trial, or with the same error."""
        failed = self._count_failed() - (self._failed_before or 0)
        if failed >= MAX_FAILURES and not self._has_better_trial():
            log.error("giving up: %d trials failed, and no trial came further; last error: %s", failed, last.reason)
            return True
        if failed >= MAX_EQUAL_FAILURES and self._have_last_failed_alike(last.reason):
            log.error("giving up: the last %d trials failed with the same error: %s", MAX_EQUAL_FAILURES, last.reason)
            return True
        if self._own_trials >= MAX_OWN_FAILURES and self._own_errors == {last.reason}:
            log.error("giving up: all trials of this worker failed with the same error: %s", last.reason)
            return True
        return False

    def _count_finished(self) -> int:
        return sum(t.state.is_finished() for t in self._context.study.trials())

    def _count_failed(self) -> int:
        return sum(t.state == TrialState.FAIL for t in self._context.study.trials())

    def _has_better_trial(self) -> bool:
        """Return whether a trial has finished, or has paused after more epochs than one of the last failed trials."""
        finished = (TrialState.COMPLETE, TrialState.PRUNED)
        trials = self._context.study.trials()
        failed = [t for t in trials if t.state == TrialState.FAIL]
        last = sorted(failed, key=lambda t: t.datetime_complete or datetime.min)[-MAX_FAILURES:]
        reached = min((len(t.intermediate_values) for t in last), default=0)
        return any(
            t.state in finished or (RUNG in t.user_attrs and len(t.intermediate_values) > reached) for t in trials
        )

    def _have_last_failed_alike(self, reason: str) -> bool:
        ended = [trial for trial in self._context.study.trials() if trial.state.is_finished()]
        last = sorted(ended, key=lambda trial: trial.datetime_complete or datetime.min)[-MAX_EQUAL_FAILURES:]
        return all(trial.state == TrialState.FAIL and trial.user_attrs.get(REASON) == reason for trial in last)

    def _is_idle_too_long(self, running: int) -> bool:
        self._idle_since = min(self._idle_since, time.monotonic())
        idle = time.monotonic() - self._idle_since
        timeout = self._context.options.idle_timeout
        if timeout is None or idle < timeout:
            return False
        log.info("no trial to claim for %.0f s, while other workers run %d trials; exiting", idle, running)
        return True

    def _wait(self) -> None:
        """Wait before the next claim. Other workers run the remaining trials, but may release them."""
        until = time.monotonic() + min(0.5 * 1.5**self._idle_claims, 5.0)
        while not self._context.shutdown.is_shutting_down and time.monotonic() < until:
            time.sleep(0.1)  # polls, because a signal handler must not take the lock of an event
        self._idle_claims += 1
