"""What all parts of a worker share, built once when it joins its study."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hpsearch.objectives.training.ranks import current
from hpsearch.search.errors import as_search_error
from hpsearch.search.process import GracefulShutdown, StopEvent, stop_worker_on_signals, watch_fleet
from hpsearch.search.pruners.study_pruner import StudyPruner, study_rungs
from hpsearch.search.samplers.known_trials import as_sampled
from hpsearch.search.services import find_services
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.study.checkpoints import open_checkpoints
from hpsearch.search.study.study import (
    check_release,
    load_study,
    require_measurable,
    runs_folder,
    with_tracking,
)
from hpsearch.search.tracking.tracker import Tracker, check_readers
from hpsearch.search.tracking.trial_run import run_tags
from hpsearch.search.worker.identity import worker_identity, worker_name
from hpsearch.search.worker.options import WorkerOptions
from hpsearch.search.worker.watchdog import Pulse
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.history import read_epoch_values
from hpsearch.storage.trials.lease import LeaseKeeper
from hpsearch.storage.trials.register import Register

log = logging.getLogger(__name__)


class WorkerContext:
    """A worker in its study.

    Args:
        name: of the study.
        options: of the worker.
        stop: whether it is to stop; by default SIGTERM and SIGINT set it.

    Attributes:
        study: the study.
        sampled: the same, opened by Optuna for its sampler.
        objective: what is trained.
        claims: gives trials to the worker.
        lease: renews the lease of the trial that runs.
        pruner: decides on pruning.
        rungs: at which trials wait; None where they do not.
        tracking: the tracking server.
        tracker: logs the trials.
        checkpoints: of the study.
        runs_dir: folder of the study's run directories on this machine.
        register: the worker's row in the study.
        shutdown: whether it is to stop, and the seconds that are left then.
        pulse: beats while the worker makes progress.
        fleet_gone: whether the fleet that started it has ended; None if no fleet did.
        failed_before: failed trials at the start of the fleet; None if unknown.

    Raises:
        SearchError: no such study, or it names no tracking server and none was given.
        ObjectiveError: the study's objective cannot be loaded here.
        StorageError: a service cannot be used.
    """

    def __init__(self, name: str, options: WorkerOptions, stop: StopEvent | threading.Event | None) -> None:
        services = find_services(options.addresses)
        storage = open_storage(services.storage_url, application_name=f"hpsearch {worker_name()}")
        self.options, self.study = options, load_study(storage, name)
        study, spec = self.study, self.study.spec
        check_release(study)
        check_readers(spec)
        services = with_tracking(services, study, required=options.tracking_required)
        if away := services.tracking_away:
            log.warning("%s; the search goes on, and what it logs waits in %s", away, services.home / "outbox")
        require_measurable(spec, options.device)
        self.objective = study.objective()
        with as_search_error(f"study {name!r} cannot be joined here: "):
            spec.sampler.get_ready()
        if warning := study.source_warning(self.objective):
            log.warning(warning)
        self.tracking = services.open_tracking()
        self.checkpoints = open_checkpoints(study, services.home, options.checkpoint_url)
        self.tracker = Tracker(
            study,
            self.tracking,
            self.checkpoints,
            services.home,
            tags=run_tags(self.objective, options.device),
            system_metrics=options.system_metrics,
        )
        self.runs_dir = runs_folder(services.home / "runs", study)
        self.sampled = as_sampled(study.open(), partial(read_epoch_values, study.engine, study.study_id))
        self.rungs = study_rungs(spec)
        metered = spec.epochs if spec.metered else None
        self.claims = Claims(
            study.engine, study.study_id, worker=worker_name(), lease=options.lease, rungs=self.rungs, metered=metered
        )
        self.lease = LeaseKeeper(self.claims)
        self.pruner = StudyPruner(spec, study.storage, study.study_id, max_age=1.0)
        self.register = Register(study.engine, study.study_id, worker_identity(options.device, options.world))
        self.pulse = Pulse(Path(options.heartbeat) if options.heartbeat else None, stall=options.stall)
        self.fleet_gone: Callable[[], bool] | None = None
        self.failed_before: int | None = None
        if fleet := os.environ.get("HPSEARCH_FLEET_PID"):
            # A rank's parent is what started it: that one looks after the fleet.
            self.fleet_gone = watch_fleet(int(fleet)) if current().alone else lambda: False
            failed = os.environ.get("HPSEARCH_FLEET_FAILED")
            self.failed_before = int(failed) if failed else None
        self.shutdown = GracefulShutdown(
            stop or stop_worker_on_signals(), grace=options.grace, max_time=options.max_time
        )

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
        """The age at which a mid-epoch checkpoint is due; None saves at the ends of epochs only."""
        return None if self.options.save_every is None else 60 * self.options.save_every

    def is_stopping(self) -> bool:
        """Whether the worker is to stop; it stops with its fleet."""
        if not self.shutdown.has_begun and self.fleet_gone is not None and self.fleet_gone():
            log.warning("the fleet that started this worker is gone: stopping")
            self.shutdown.begin()
        return self.shutdown.has_begun
