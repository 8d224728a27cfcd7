"""A worker process: joins a study by its name, with what the study itself says, and stops when it is told to."""

from __future__ import annotations

import logging
import sys
import threading

import optuna

from hpsearch.objectives.training.ranks import RankLostError, current
from hpsearch.search.process import (
    EXIT_AWAY,
    EXIT_DONE,
    EXIT_DRAINED,
    EXIT_GAVE_UP,
    StopEvent,
)
from hpsearch.search.tracking.publish import close_if_spent
from hpsearch.search.tracking.rebuild import needed, resend
from hpsearch.search.worker.attempt import SERVICE_ERRORS
from hpsearch.search.worker.context import WorkerContext
from hpsearch.search.worker.identity import worker_name
from hpsearch.search.worker.loop import Worker
from hpsearch.search.worker.options import WorkerOptions
from hpsearch.storage.attributes import STOPPED
from hpsearch.storage.errors import CheckpointStoreError, one_line

log = logging.getLogger(__name__)

# Seconds that a worker stays for MLflow when there is nothing left to train, and when it was told to go.
_PATIENCE, _GRACE = 60.0, 10.0

# Exit codes, for a person.
_HOW = {
    EXIT_DONE: "nothing was to be taken",
    EXIT_DRAINED: "told to go",
    EXIT_GAVE_UP: "the objective failed every trial",
    EXIT_AWAY: "a service was away",
}


def join_study(name: str, options: WorkerOptions, stop: StopEvent | threading.Event | None = None) -> int:
    """Be a worker process of study `name`; return its exit code. For what it raises see `work_on`.

    Args:
        name: of the study.
        options: of the worker.
        stop: ends it when it is set; by default SIGTERM and SIGINT do, where this is the main thread.
    """
    _log_to_stderr()
    return work_on(name, options, stop)


def work_on(name: str, options: WorkerOptions, stop: StopEvent | threading.Event | None) -> int:
    """Run a worker of study `name` in this process, until it is told to stop at the latest; return its exit code.

    Args:
        name: of the study.
        options: of the worker.
        stop: set to tell it; without one it is told by signals, as soon as there is anything that it could hold.

    Raises:
        SearchError: no such study, or it names no tracking server and none was given.
        ObjectiveError: the study's objective cannot be loaded here.
        StorageError: a service cannot be used.
    """
    context = WorkerContext(name, options, stop)
    code = EXIT_AWAY
    try:
        context.tracker.sender.start()
        current().on_told_to_go = context.shutdown.begin  # if another rank gets the signal
        log.info("worker %s joins study %s", worker_name(), name)
        context.register.enter()
        ended = Worker(context).work()
        _send_rest(context, over=ended == EXIT_DONE)
        code = ended
    except SERVICE_ERRORS as error:
        # The trial is free as soon as this process has ended: the next start of this worker resumes it.
        log.error("the study's database does not answer: %s", one_line(error, 300))
    except RankLostError as error:
        log.error("the trial is left to other workers: %s", error)
    except CheckpointStoreError as error:
        log.error("the trial is given back: %s", error)
    finally:
        context.register.leave(_HOW.get(code, f"exit code {code}"))
        context.tracker.sender.close()
    log.info("worker %s leaves with exit code %d", worker_name(), code)
    return code


def _send_rest(context: WorkerContext, *, over: bool) -> None:
    """Send what MLflow was not told yet, and close the study where this worker was its last."""
    study, tracker, checkpoints, shutdown = context.study, context.tracker, context.checkpoints, context.shutdown
    over = over and STOPPED not in study.attrs
    # Whoever stops a worker kills it when its grace is over: what is left is sent by the next one, or by `run`.
    patience = _PATIENCE if over and not shutdown.has_begun else min(_GRACE, max(shutdown.seconds_left(), 1.0))
    if left := tracker.sender.flush(patience):
        rest = f"hpsearch sync {study.spec.name}"
        log.warning("%s not been told all of %d trials: send the rest with: %s", tracker.sender.behind, left, rest)
    checkpoints.tidy(context.runs_dir)
    # `hpsearch run` does what follows after its workers; done by each of them it would take seconds in vain.
    alone = context.fleet_gone is None or context.fleet_gone()
    if over and (alone or study.spec.finalists_of is not None):
        resend(study, tracker, checkpoints, only=needed(study), objective=context.objective)
        tracker.sender.flush(patience)
        close_if_spent(study, context.tracking)


def _log_to_stderr() -> None:
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True
    )
    for noisy in ("alembic", "httpx", "urllib3", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
