"""Services and settings that all parts of a worker share."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hpsearch.objectives.base_objective import BaseObjective
from hpsearch.objectives.training.ranks import current_ranks
from hpsearch.search.errors import SearchError, as_search_error
from hpsearch.search.process.children import make_fleet_watcher
from hpsearch.search.process.signals import GracefulShutdown, StopEvent, stop_worker_on_signals
from hpsearch.search.pruners.study_pruner import StudyPruner, make_rungs
from hpsearch.search.samplers.known_trials import make_sampler_study_view
from hpsearch.search.services import find_services
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.study.checkpoints import (
    StudyCheckpoints,
    check_checkpoint_url,
    find_checkpoint_warning,
    open_checkpoints,
)
from hpsearch.search.study.folders import get_runs_folder
from hpsearch.search.study.study import (
    StoredStudy,
    check_release,
    load_study,
    require_measurable,
    require_one_device,
)
from hpsearch.search.study.study_tracking import resolve_tracking
from hpsearch.search.tracking.tracker import Tracker, check_trackers
from hpsearch.search.tracking.trial_run import run_tags
from hpsearch.search.worker.identity import worker_identity, worker_name
from hpsearch.search.worker.options import WorkerOptions
from hpsearch.search.worker.startup import Startup
from hpsearch.search.worker.watchdog import Watchdog
from hpsearch.storage.attributes import DATA_SHA256
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.history import read_epoch_values
from hpsearch.storage.trials.lease_thread import LeaseKeeper
from hpsearch.storage.trials.worker_registry import WorkerRegistration

log = logging.getLogger(__name__)


class WorkerContext:
    """Services and settings of a worker of one study.

    Args:
        name: name of the study.
        options: options of the worker.
        stop: event that stops the worker; if None, SIGTERM and SIGINT stop the worker.

    Attributes:
        study: the study.
        sampled: Optuna's study object of the same study, with the sampler.
        objective: objective to train.
        data_sha256: hash of the data at the study's creation; None if unknown.
        claims: object with which this worker claims trials and reports epochs.
        lease: thread that renews the lease of the running trial.
        pruner: pruner of the study.
        rungs: epochs at which trials pause; None if the pruner has no rungs.
        services: services of the study.
        tracking: client of the tracking server.
        tracker: writer and sender of the trials' journals.
        checkpoints: checkpoints of the study.
        runs_dir: folder of the study's run directories on this machine.
        registration: the worker's row in the database.
        shutdown: state of the graceful shutdown, with the remaining seconds.
        watchdog: monitor of the worker's progress.
        startup: monitor of the start of attempts; None if the worker shares its process with other code.
        is_fleet_gone: function that returns whether the fleet that started the worker has ended; None if no fleet
            started the worker.
        failed_at_start: number of failed trials at the start of the fleet; None if unknown.

    Raises:
        SearchError: the study does not exist, or it has no tracking server and the options give none.
        ObjectiveError: the study's objective cannot be loaded on this machine.
        StorageError: a service is unavailable.
    """

    def __init__(self, name: str, options: WorkerOptions, stop: StopEvent | threading.Event | None) -> None:
        services = find_services(options.addresses)
        storage = open_storage(services.storage_url, application_name=f"hpsearch {worker_name()}")
        self.options, self.study = options, load_study(storage, name)
        study, spec = self.study, self.study.spec
        _check_not_replaced(study)
        check_release(study)
        study.check_restored()
        check_trackers(spec)
        services = resolve_tracking(services, study, required=options.tracking_required)
        if error := services.tracking_error:
            log.warning("%s; the search continues, and unsent records are in %s", error, services.home / "outbox")
        require_measurable(spec, options.device)
        require_one_device(spec.folds, options.world_size)
        self.objective = study.objective(allow_changed=True)
        study.check_restored(self.objective)
        with as_search_error(f"study {name!r} cannot run on this machine: "):
            spec.sampler.prepare()
        self.data_sha256: str | None = study.attrs.get(DATA_SHA256)
        if warning := study.source_warning(self.objective):
            log.warning(warning)
        if warning := study.find_devices_warning(options.world_size):
            log.warning(warning)
        self.services, self.tracking = services, services.open_tracking()
        self.checkpoints = _open_checkpoints(study, self.objective, services.home, options.checkpoint_url)
        self.tracker = Tracker(
            study,
            self.tracking,
            self.checkpoints,
            services.home,
            tags=run_tags(self.objective, options.device),
            system_metrics=options.system_metrics,
        )
        self.runs_dir = get_runs_folder(services.home / "runs", study)
        self.sampled = make_sampler_study_view(study.open(), partial(read_epoch_values, study.engine, study.study_id))
        self.rungs = make_rungs(spec)
        metered_epochs = spec.epochs if spec.has_epoch_or_time_budget else None
        self.claims = Claims(
            study.engine,
            study.study_id,
            worker=worker_name(),
            lease=options.lease,
            rungs=self.rungs,
            metered_epochs=metered_epochs,
            may_be_preempted="HPSEARCH_FLEET_PID" not in os.environ,  # `run` and its workers are on one machine
        )
        self.lease = LeaseKeeper(self.claims)
        self.pruner = StudyPruner(spec, study.storage, study.study_id, max_age=1.0)
        identity = worker_identity(options.device, options.world_size)
        self.registration = WorkerRegistration(study.engine, study.study_id, identity)
        heartbeat = Path(options.heartbeat) if options.heartbeat else None
        self.watchdog = Watchdog(heartbeat, stall_factor=options.stall_factor, end_timeout=options.barrier_timeout)
        self.is_fleet_gone: Callable[[], bool] | None = None
        self.failed_at_start: int | None = None
        if fleet := os.environ.get("HPSEARCH_FLEET_PID"):
            self.is_fleet_gone = lambda: False  # the parent of a rank, the process of its node, watches the fleet
            if current_ranks().is_single_process:
                self.is_fleet_gone = make_fleet_watcher(int(fleet))
                self.watchdog.watch_fleet(self.is_fleet_gone, options.grace)
            failed = os.environ.get("HPSEARCH_FLEET_FAILED")
            self.failed_at_start = int(failed) if failed else None
        stop = stop or stop_worker_on_signals()
        self.startup: Startup | None = None
        self.shutdown = GracefulShutdown(stop, grace=options.grace, max_time=options.max_time)

    @property
    def spec(self) -> StudySpec:
        """The study's spec."""
        return self.study.spec

    @property
    def storage(self) -> PostgresStorage:
        """The study's storage."""
        return self.study.storage

    @property
    def save_every_seconds(self) -> float | None:
        """The seconds between two mid-epoch checkpoints; None saves checkpoints only at the ends of epochs."""
        return None if self.options.save_every is None else 60 * self.options.save_every

    def is_stopping(self) -> bool:
        """Return whether the worker should stop. The end of its fleet also stops the worker."""
        if not self.shutdown.is_shutting_down and self.is_fleet_gone is not None and self.is_fleet_gone():
            log.warning("the hpsearch process that started this worker has ended; the worker stops")
            self.shutdown.start()
        return self.shutdown.is_shutting_down


def _read_study_of_command() -> tuple[str, str]:
    """Return name and id of the study that the command which started this worker has opened; empty without command."""
    name, _, study_id = os.environ.get("HPSEARCH_FLEET_STUDY", "").rpartition("/")
    return name, study_id


def _check_not_replaced(study: StoredStudy) -> None:
    """Check that the study is the one that the command which started this worker has opened, if there is one.

    Raises:
        SearchError: the study was replaced by another study of the same name.
    """
    name, study_id = _read_study_of_command()
    if name == study.spec.name and study_id != str(study.study_id):
        raise SearchError(f"study {name!r} was replaced by another study of the same name; repeat the command")


def _open_checkpoints(study: StoredStudy, objective: BaseObjective, home: Path, url: str | None) -> StudyCheckpoints:
    """Return the checkpoints of the study at `url`, or else at the stored URL, or else in the home folder.

    Raises:
        SearchError: a command such as `run` started this worker, and the objective must not load checkpoints from the
            stored URL. The command `worker` itself is a request to run the code of the study.
        StorageError: the URL cannot be used.
    """
    if warning := find_checkpoint_warning(study, url):
        log.warning(warning)
    checkpoints = open_checkpoints(study, home, url)
    if _read_study_of_command()[0] == study.spec.name:
        check_checkpoint_url(study, objective, home, url)  # after the use of the stored URL
    return checkpoints
