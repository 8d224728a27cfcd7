"""Drive a fleet until the study's budget is spent."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from mlflow.exceptions import MlflowException
from optuna.trial import TrialState
from rich.console import Console
from sqlalchemy.exc import DBAPIError

from hpsearch.search.console import command, steps
from hpsearch.search.errors import SearchError
from hpsearch.search.fleet.devices import check_devices
from hpsearch.search.fleet.fleet import Fleet
from hpsearch.search.fleet.fork import visible_gpus
from hpsearch.search.process import restore_handlers, stop_on_signals
from hpsearch.search.run.live import LiveView
from hpsearch.search.services import DASHBOARD, Services
from hpsearch.search.study.checkpoints import open_checkpoints
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.tracking.rebuild import needed, resend
from hpsearch.search.tracking.tracker import Tracker, open_parent_run
from hpsearch.search.worker.options import WorkerOptions
from hpsearch.storage.attributes import STOPPED
from hpsearch.storage.database.locks import LockHeldError, LockLostError
from hpsearch.storage.embedded import stack
from hpsearch.storage.errors import StorageError
from hpsearch.storage.mlflow.client import RunDeletedError
from hpsearch.storage.mlflow.health import TrackingAwayError, describe_error
from hpsearch.storage.trials.history import Progress, read_progress

_EVERY = 5.0  # seconds; a look costs about 30 ms


@contextmanager
def kept_up(home: Path) -> Iterator[threading.Event]:
    """Start services again that end by themselves; yield an event that is set when ``hpsearch down`` stopped them."""
    done, stopped = threading.Event(), threading.Event()

    def watch() -> None:
        while not done.wait(_EVERY):
            try:
                states = {service.state for service in stack.status(home)}
                if states == {"stopped"}:
                    stopped.set()
                elif "dead" in states:
                    stack.up(home, dashboard=DASHBOARD)
            except StorageError:
                continue  # it may be mended at the next look; the workers tell what they miss

    thread = threading.Thread(target=watch, name="keeper", daemon=True)
    thread.start()
    try:
        yield stopped
    finally:
        done.set()
        thread.join()


_POLL = 0.5  # seconds
_GRACE = 10.0  # seconds for MLflow after Ctrl-C


def open_run(services: Services, study: StoredStudy, *, required: bool) -> str | None:
    """Make the study's run in MLflow; return why it cannot be made now, where that is no reason to wait.

    Raises:
        StorageError: the tracking server is `required`, or somebody deleted the experiment.
    """
    if services.tracking_away:
        return services.tracking_away
    try:
        open_parent_run(study, services.open_tracking())
    except RunDeletedError as error:
        if required:
            raise
        return f"MLflow is told nothing of study {study.spec.name!r}: {error}"
    except (MlflowException, LockHeldError, LockLostError) as error:
        away = f"--tracking-uri {services.tracking_uri}: no run can be opened in MLflow ({describe_error(error)})"
        if required:
            raise TrackingAwayError(away) from None
        return away
    return None


def require_started(study: StoredStudy) -> None:
    """Raise SearchError if the study was stopped."""
    if why := study.attrs.get(STOPPED):
        name = study.spec.name
        raise SearchError(f"study {name!r} was stopped {why}: start it with {command('start', name)}")


def drive(
    console: Console,
    services: Services,
    study: StoredStudy,
    workers: int,
    options: WorkerOptions,
) -> tuple[bool, tuple[str, ...]]:
    """Run the fleet until no worker is left; return whether it was interrupted, and why workers gave up."""
    options = options.model_copy(update=dict(services.addresses))
    check_devices(options)
    logs = services.home / "logs" / study.spec.name
    failed = len(study.trials(TrialState.FAIL))
    name, gpus = study.spec.name, visible_gpus()
    fleet = Fleet(name, options, workers=workers, log_dir=logs, gpus=gpus, failed_before=failed)
    others = f", from {fleet.slots[0].log.name} on: another run writes those before" if fleet.slots[0].index else ""
    console.print(f"worker logs: {logs}{others}")
    engine = study.engine
    told = False
    progress, away = Progress(study.spec.n_trials), False

    def look() -> tuple[Progress, bool]:
        try:
            return read_progress(engine, study.study_id, study.spec.direction, patience=0.0), False
        except DBAPIError:
            return progress, True

    keeper = kept_up(services.home) if services.embedded else nullcontext()
    with restore_handlers():
        stop = stop_on_signals(
            signal.SIGINT, signal.SIGTERM, signal.SIGHUP, kill=lambda: fleet.stop(kill=True), request=fleet.stop
        )
        try:
            fleet.start()
            with keeper as kept, LiveView(console, study.spec, fleet) as view:
                while fleet.poll(progress.with_result, away=away):
                    progress, away = look()
                    view.update(progress, away=away)
                    if kept is not None and kept.is_set():
                        fleet.stop()
                    if stop.is_set() and not told:
                        told = True
                        view.say("stopping: workers end their epoch and save (Ctrl-C again kills them)")
                    time.sleep(_POLL)  # no Event: the signal's handler would wait for its lock
                view.update(look()[0])
        finally:
            fleet.stop()  # on an error of ours they save what they have
            fleet.close()
    return stop.is_set(), fleet.gave_up


@contextmanager
def without_mlflow(console: Console, what: str, again: str) -> Iterator[None]:
    """Print a warning for any error within: a server that is away must not hide a result.

    Args:
        console: for the warning.
        what: MLflow lacks then.
        again: the command that sends it.
    """
    try:
        yield
    except Exception as error:
        console.print(f"MLflow lacks {what} ({describe_error(error)}); send it with: {again}", style="yellow")


def tell_outbox(console: Console, services: Services, study: StoredStudy, *, interrupted: bool) -> None:
    """Send MLflow and other readers what of the study waits on this machine, and print what is left."""
    checkpoints = open_checkpoints(study, services.home, None)
    tracker = Tracker(study, services.open_tracking(), checkpoints, services.home)

    def winner() -> None:
        resend(study, tracker, checkpoints, only=needed(study))  # of trials of machines that are gone

    with steps(console) as tell:
        patience = _GRACE if interrupted else math.inf
        left = tracker.deliver(tell, patience=patience, then=(lambda: None) if interrupted else winner)
    if left:
        why = f" ({tracker.sender.away})" if tracker.sender.away else ""
        again = command("sync", study.spec.name)
        console.print(
            f"{tracker.sender.behind} not been told all of {left} trials{why}; send the rest with: {again}",
            style="yellow",
        )
