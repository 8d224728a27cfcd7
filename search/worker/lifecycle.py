"""A worker process: join a study, run its trials, and exit with a code."""

from __future__ import annotations

import logging
import os
import threading

import optuna
import torch

from hpsearch.objectives.training.rank_errors import RankLostError
from hpsearch.objectives.training.ranks import current_ranks
from hpsearch.search.console import log_to_stderr, pluralize
from hpsearch.search.process.children import end_session
from hpsearch.search.process.exits import EXIT_DONE, EXIT_DRAINED, EXIT_GAVE_UP, EXIT_UNAVAILABLE, EXIT_USER_ERROR
from hpsearch.search.process.signals import StopEvent
from hpsearch.search.tracking.rebuild import list_trials_requiring_model, resend
from hpsearch.search.tracking.study_run import publish_result
from hpsearch.search.worker.attempt import SERVICE_ERRORS
from hpsearch.search.worker.context import WorkerContext
from hpsearch.search.worker.identity import worker_name
from hpsearch.search.worker.loop import Worker
from hpsearch.search.worker.options import WorkerOptions
from hpsearch.search.worker.startup import Startup
from hpsearch.storage.errors import CheckpointStoreError, UnsafeCheckpointError, format_error

log = logging.getLogger(__name__)

# Maximum time to send records to MLflow before the exit: if no trials are left, and after a stop signal.
_DELIVERY_SECONDS, _STOPPED_DELIVERY_SECONDS = 60.0, 10.0

_EXIT_REASONS = {
    EXIT_DONE: "no trial left to run",
    EXIT_DRAINED: "stopped",
    EXIT_GAVE_UP: "trials failed",
    EXIT_UNAVAILABLE: "a service was unavailable",
    EXIT_USER_ERROR: "a checkpoint needs the user's confirmation",
}


def join_study(name: str, options: WorkerOptions, stop: StopEvent | threading.Event | None = None) -> int:
    """Run a worker of study `name` as this process, with logs on stderr, and return its exit code; see `run_worker`.

    Args:
        name: name of the study.
        options: options of the worker.
        stop: event that stops the worker. If None, SIGTERM and SIGINT stop the worker. With one device, they end this
            process at once while a trial starts.
    """
    log_as_worker()
    return run_worker(name, options, stop, is_own_process=stop is None)


def run_worker(
    name: str, options: WorkerOptions, stop: StopEvent | threading.Event | None, *, is_own_process: bool = False
) -> int:
    """Run a worker of study `name` in this process; return its exit code.

    Args:
        name: name of the study.
        options: options of the worker.
        stop: event that stops the worker. If None, SIGTERM and SIGINT stop a worker in the main thread.
        is_own_process: whether the worker may end this process.

    Raises:
        SearchError: the study does not exist, or it has no tracking server and the options give none.
        ObjectiveError: the objective cannot be loaded on this machine.
        StorageError: a service is unavailable.
    """
    context = WorkerContext(name, options, stop)
    # With several ranks, a signal may mean that another rank has died, and such an attempt is not without cost.
    if is_own_process and options.world_size == 1:

        def leave() -> None:
            end_session()
            context.registration.record_exit(_EXIT_REASONS[EXIT_DRAINED])

        context.startup = Startup(context.is_stopping, leave)
    code = EXIT_UNAVAILABLE
    try:
        context.tracker.sender.start()
        ranks = current_ranks()
        ranks.on_stop_request = context.shutdown.start  # called if another rank gets the signal
        ranks.on_rank_lost = context.watchdog.exit
        log.info("worker %s joins study %s", worker_name(), name)
        context.registration.register()
        if warning := _find_excess_of_threads(context.registration.count_on_machine()):
            log.warning("%s", warning)
        exit_code = Worker(context).run_trials()
        _deliver_records(context, is_done=exit_code == EXIT_DONE)
        code = exit_code
    except SERVICE_ERRORS as error:
        # Other workers can take the trial as soon as this process has ended.
        log.error("the study's database does not answer, or rejected a statement: %s", format_error(error, 300))
    except (RankLostError, CheckpointStoreError) as error:
        log.error("trial released, worker exits: %s", error)
        code = EXIT_USER_ERROR if isinstance(error, UnsafeCheckpointError) else code
    finally:
        context.registration.record_exit(_EXIT_REASONS.get(code, f"exit code {code}"))
        context.tracker.sender.close()
    if is_own_process and (left := end_session()):
        log.warning("killed processes that code of the objective left: %s", ", ".join(map(str, left)))
    log.info("worker %s exits with code %d", worker_name(), code)
    return code


def _find_excess_of_threads(workers: int) -> str | None:
    """Return a warning if each of several workers on this machine uses all cores; `run` divides the cores."""
    threads = torch.get_num_threads()
    if workers < 2 or threads < 2 or "OMP_NUM_THREADS" in os.environ:
        return None
    return (
        f"each of the {workers} workers on this machine may use {threads} threads, which makes all of them slower; "
        f"set OMP_NUM_THREADS={max(1, threads // workers)} for each"
    )


def _deliver_records(context: WorkerContext, *, is_done: bool) -> None:
    """Send the remaining records to MLflow; if the study is done and no fleet will close it, close the study."""
    study, tracker, checkpoints, shutdown = context.study, context.tracker, context.checkpoints, context.shutdown
    is_done = is_done and study.stopped is None
    # A stopped worker is killed after its grace period. The next worker, or `run`, sends the remaining records.
    timeout = _DELIVERY_SECONDS
    if not is_done or shutdown.is_shutting_down:
        timeout = min(_STOPPED_DELIVERY_SECONDS, max(shutdown.seconds_left(), 1.0))
    if left := tracker.sender.flush(timeout):
        unsent = f"{pluralize(left, 'trial')} not fully sent to {tracker.sender.lagging_consumers}"
        log.warning("%s; send the remaining records with: hpsearch sync %s", unsent, study.spec.name)
    checkpoints.clean_up(context.runs_dir)
    # `hpsearch run` does the rest once, after all its workers have ended.
    has_no_fleet = context.is_fleet_gone is None or context.is_fleet_gone()
    if is_done and (has_no_fleet or study.spec.finalists_of is not None):
        resend(study, tracker, checkpoints, only=list_trials_requiring_model(study), objective=context.objective)
        tracker.sender.flush(timeout)
        if report := publish_result(context.services, study, context.tracking):
            log.info("report: %s", report)


def log_as_worker() -> None:
    """Print the log of this process on stderr, without the details of libraries."""
    log_to_stderr(logging.INFO)
    for name in ("alembic", "httpx", "urllib3", "matplotlib"):
        logging.getLogger(name).setLevel(logging.WARNING)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
