"""A worker process: joins a study by its name, with what the study itself says, and stops when it is told to."""

from __future__ import annotations

import logging
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import optuna

from hpsearch.objectives.objective import BaseObjective
from hpsearch.objectives.training.ranks import RankLostError, current
from hpsearch.search.errors import SearchError
from hpsearch.search.process import (
    EXIT_AWAY,
    EXIT_DONE,
    EXIT_DRAINED,
    EXIT_GAVE_UP,
    GracefulShutdown,
    StopEvent,
    stop_worker_on_signals,
    watch_fleet,
)
from hpsearch.search.services import find_services
from hpsearch.search.study.checkpoints import StudyCheckpoints, open_checkpoints
from hpsearch.search.study.study import (
    StoredStudy,
    check_release,
    load_study,
    require_measurable,
    runs_folder,
    with_tracking,
)
from hpsearch.search.tracking.publish import close_if_spent
from hpsearch.search.tracking.rebuild import needed, resend
from hpsearch.search.tracking.tracker import Tracker, check_readers
from hpsearch.search.tracking.trial_run import run_tags
from hpsearch.search.worker.attempt import SERVICE_ERRORS
from hpsearch.search.worker.identity import worker_identity, worker_name
from hpsearch.search.worker.loop import Worker
from hpsearch.search.worker.options import WorkerOptions
from hpsearch.search.worker.ranks import hear
from hpsearch.search.worker.watchdog import Pulse
from hpsearch.storage.attributes import STOPPED
from hpsearch.storage.errors import CheckpointStoreError, one_line
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.study_storage.storage import open_storage
from hpsearch.storage.trials.register import Register

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
    joined = _join(name, options)
    study, tracker = joined.study, joined.tracker
    fleet, failed = os.environ.get("HPSEARCH_FLEET_PID"), os.environ.get("HPSEARCH_FLEET_FAILED")
    # A rank's parent is what started it: that one looks after the fleet.
    fleet_gone = (watch_fleet(int(fleet)) if current().alone else lambda: False) if fleet else None
    register = Register(study.engine, study.study_id, worker_identity(options.device, options.world))
    code = EXIT_AWAY
    try:
        tracker.sender.start()
        shutdown = GracefulShutdown(stop or stop_worker_on_signals(), grace=options.grace, max_time=options.max_time)
        hear(current(), told=lambda: False, leave=shutdown.begin)
        worker = Worker(
            study,
            joined.objective,
            tracker=tracker,
            runs_dir=joined.runs,
            checkpoints=joined.checkpoints,
            shutdown=shutdown,
            pulse=Pulse(Path(options.heartbeat) if options.heartbeat else None, stall=options.stall),
            register=register,
            save_every=None if options.save_every is None else 60 * options.save_every,
            leave_when_idle=options.leave_when_idle,
            max_trials=options.max_trials,
            failed_before=int(failed) if fleet and failed else None,
            fleet_gone=fleet_gone or (lambda: False),
            device=options.device,
            lease=options.lease,
        )
        log.info("worker %s joins study %s", worker_name(), name)
        register.enter()
        code = worker.work()
        _send_rest(joined, shutdown, over=code == EXIT_DONE, alone=fleet_gone is None or fleet_gone())
    except SERVICE_ERRORS as error:
        # Its trial is free as soon as this process is gone: whoever starts this worker again goes on with it.
        log.error("the study's database does not answer: %s", one_line(error, 300))
        code = EXIT_AWAY
    except RankLostError as error:
        log.error("the trial is left to other workers: %s", error)
        code = EXIT_AWAY
    except CheckpointStoreError as error:
        log.error("the trial is given back: %s", error)
        code = EXIT_AWAY
    finally:
        register.leave(_HOW.get(code, f"exit code {code}"))
        tracker.sender.close()
    log.info("worker %s leaves with exit code %d", worker_name(), code)
    return code


@dataclass(frozen=True)
class _Joined:
    """What a worker has of its study."""

    study: StoredStudy
    objective: BaseObjective
    tracking: Tracking
    tracker: Tracker
    checkpoints: StudyCheckpoints
    runs: Path


def _join(name: str, options: WorkerOptions) -> _Joined:
    services = find_services(options.addresses)
    storage = open_storage(services.storage_url, application_name=f"hpsearch {worker_name()}")
    study = load_study(storage, name)
    check_release(study)
    check_readers(study.spec)
    services = with_tracking(services, study, required=options.tracking_required)
    if away := services.tracking_away:
        log.warning("%s; the search goes on, and what it logs waits in %s", away, services.home / "outbox")
    require_measurable(study.spec, options.device)
    objective = study.objective()
    try:
        study.spec.sampler.get_ready()
    except ValueError as error:
        raise SearchError(f"study {name!r} cannot be joined here: {error}") from None
    if warning := study.source_warning(objective):
        log.warning(warning)
    tracking = services.open_tracking()
    checkpoints = open_checkpoints(study, services.home, options.checkpoint_url)
    tags = run_tags(objective, options.device)
    tracker = Tracker(study, tracking, checkpoints, services.home, tags=tags, system_metrics=options.system_metrics)
    return _Joined(study, objective, tracking, tracker, checkpoints, services.home / "runs")


def _send_rest(joined: _Joined, shutdown: GracefulShutdown, *, over: bool, alone: bool) -> None:
    """Send what MLflow was not told yet, and close the study where this worker was its last."""
    study, tracker, checkpoints = joined.study, joined.tracker, joined.checkpoints
    over = over and STOPPED not in study.attrs
    # Whoever stops a worker kills it when its grace is over: what is left is sent by the next one, or by `run`.
    patience = _PATIENCE if over and not shutdown.has_begun else min(_GRACE, max(shutdown.seconds_left(), 1.0))
    if left := tracker.sender.flush(patience):
        rest = f"hpsearch sync {study.spec.name}"
        log.warning("%s not been told all of %d trials: send the rest with: %s", tracker.sender.behind, left, rest)
    checkpoints.tidy(runs_folder(joined.runs, study))
    # `hpsearch run` does what follows after its workers; done by each of them it would take seconds in vain.
    if over and (alone or study.spec.finalists_of is not None):
        resend(study, tracker, checkpoints, only=needed(study), objective=joined.objective)
        tracker.sender.flush(patience)
        close_if_spent(study, joined.tracking)


def _log_to_stderr() -> None:
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True
    )
    for noisy in ("alembic", "httpx", "urllib3", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
