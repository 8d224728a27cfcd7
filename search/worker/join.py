"""A worker process: joins a study by its name, with what the study itself says, and stops when it is told to."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import optuna

from objectives import load_objective
from search.early import leave_when_told
from search.entry import EXIT_AWAY, EXIT_DONE
from search.publish.study import close_if_spent
from search.services import find_services
from search.study.checkpoints import open_checkpoints
from search.study.folders import runs_folder
from search.study.study import load_study
from search.study.summary import summarise
from search.study.tracking import with_tracking
from search.tracking.provenance import run_tags
from search.tracking.rebuild import resend
from search.tracking.tracker import Tracker
from search.worker.attempt import SERVICE_ERRORS
from search.worker.leaving import Leaving, Told
from search.worker.loop import Worker, worker_name
from search.worker.options import WorkerOptions
from search.worker.orphan import watch_fleet
from search.worker.pulse import Pulse
from search.worker.signals import stop_on_signals
from storage.attributes import STOPPED
from storage.errors import CheckpointStoreError
from storage.study_storage.opening import open_storage

log = logging.getLogger(__name__)

# Seconds that a worker stays for MLflow when there is nothing left to train, and when it was told to go.
_PATIENCE, _GRACE = 60.0, 10.0


def join_study(name: str, options: WorkerOptions, stop: Told | None = None) -> int:
    """Be a worker process of study `name`; return its exit code. For what it raises see `work_on`.

    Args:
        name: of the study.
        options: of the worker.
        stop: ends it when it is set; by default SIGTERM and SIGINT do, where this is the main thread.
    """
    _log_to_stderr()
    if stop is None:
        leave_when_told()
    return work_on(name, options, stop)


def work_on(name: str, options: WorkerOptions, stop: Told | None) -> int:
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
    services = find_services(options.storage_url, options.tracking_uri, home=options.home)
    application = f"hpsearch {worker_name()}"
    storage = open_storage(services.storage_url, application_name=application)
    study = load_study(storage, name)
    services = with_tracking(services, study, required=options.tracking_required)
    if away := services.tracking_away:
        log.warning("%s; the search goes on, and what it logs waits in %s", away, services.home / "outbox")
    objective = load_objective(study.spec.objective)
    objective.judge_by(study.spec.metric, study.spec.direction)
    if warning := study.source_warning(objective):
        log.warning(warning)
    tracking = services.open_tracking()
    checkpoints = open_checkpoints(study, services.home, options.checkpoint_url)
    runs = services.home / "runs"
    tags = run_tags(objective, options.device)
    tracker = Tracker(study, tracking, checkpoints, services.home, tags=tags, system_metrics=options.system_metrics)
    fleet = os.environ.get("HPSEARCH_FLEET_PID")
    fleet_gone = watch_fleet(int(fleet)) if fleet else None
    code = EXIT_AWAY
    try:
        tracker.sender.start()
        told = stop or stop_on_signals()
        leaving = Leaving(told, grace=options.grace, max_time=options.max_time)
        worker = Worker(
            study,
            objective,
            tracker=tracker,
            runs_dir=runs,
            checkpoints=checkpoints,
            leaving=leaving,
            pulse=Pulse(Path(options.heartbeat) if options.heartbeat else None, stall=options.stall),
            save_every=None if options.save_every is None else 60 * options.save_every,
            leave_when_idle=options.leave_when_idle,
            max_trials=options.max_trials,
            fleet_gone=fleet_gone or (lambda: False),
            device=options.device,
            lease=options.lease,
        )
        log.info("worker %s joins study %s", worker_name(), name)
        code = worker.work()
        over = code == EXIT_DONE and STOPPED not in study.attrs
        # Whoever stops a worker kills it when its grace is over: what is left is sent by the next one, or by `run`.
        patience = _PATIENCE if over and not leaving.begun else min(_GRACE, max(leaving.left(), 1.0))
        left = tracker.sender.flush(patience)
        if left:
            log.warning("MLflow has not been told all of %d trials: send the rest with: hpsearch sync %s", left, name)
        checkpoints.tidy(runs_folder(runs, study))
        # `hpsearch run` does what follows after its workers; done by each of them it would take seconds in vain.
        if over and (fleet_gone is None or fleet_gone() or study.spec.finalists_of is not None):
            best = summarise(study).best
            resend(study, tracker, checkpoints, only=[] if best is None else [best.number], objective=objective)
            tracker.sender.flush(patience)
            close_if_spent(study, tracking)
    except SERVICE_ERRORS as error:
        # Its trial is free as soon as this process is gone: whoever starts this worker again goes on with it.
        log.error("the study's database does not answer: %s", " ".join(str(error).split())[:300])
        code = EXIT_AWAY
    except CheckpointStoreError as error:
        log.error("the trial is given back: %s", error)
        code = EXIT_AWAY
    finally:
        tracker.sender.close()
    log.info("worker %s leaves with exit code %d", worker_name(), code)
    return code


def _log_to_stderr() -> None:
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True
    )
    for noisy in ("alembic", "httpx", "urllib3", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
