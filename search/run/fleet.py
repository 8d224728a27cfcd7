"""Run a fleet of workers on this machine until the budget of the study is spent."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from mlflow.exceptions import MlflowException
from optuna.trial import TrialState
from rich.console import Console
from sqlalchemy.exc import DataError, DBAPIError, SQLAlchemyError

from hpsearch.search.console import format_command, pluralize, show_steps
from hpsearch.search.errors import SearchError
from hpsearch.search.fleet.cores_and_gpus import visible_gpus
from hpsearch.search.fleet.fleet import Fleet
from hpsearch.search.fleet.rank_launcher import check_devices
from hpsearch.search.process.signals import ENDING_SIGNALS, restore_handlers, stop_on_signals
from hpsearch.search.report import update_report
from hpsearch.search.run.live import LiveView
from hpsearch.search.run.running import register_search
from hpsearch.search.services import DASHBOARD_COMMAND, Services
from hpsearch.search.study.checkpoints import open_checkpoints
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.tracking.rebuild import list_trials_requiring_model, resend
from hpsearch.search.tracking.study_run import log_report
from hpsearch.search.tracking.tracker import Tracker, open_parent_run
from hpsearch.search.worker.options import WorkerOptions
from hpsearch.storage.database.locks import LockHeldError, LockLostError
from hpsearch.storage.embedded import stack
from hpsearch.storage.errors import ServiceUnavailableError, StorageError
from hpsearch.storage.mlflow.client import RunDeletedError
from hpsearch.storage.mlflow.health import TrackingUnavailableError, describe_error
from hpsearch.storage.trials.history import Progress, read_progress
from hpsearch.storage.trials.lost_attempts import LossCause, record_loss_cause

_SUPERVISION_SECONDS = 5.0  # interval between two checks; a check takes about 30 ms


@contextmanager
def supervise_services(home: Path) -> Iterator[threading.Event]:
    """Restart dead services of the embedded stack during this block.

    Yields:
        An event that is set when the stack was stopped with ``hpsearch down``.
    """
    done, stopped = threading.Event(), threading.Event()

    def restart_dead_services() -> None:
        while not done.wait(_SUPERVISION_SECONDS):
            try:
                states = {service.state for service in stack.read_status(home)}
                if states == {"stopped"}:
                    stopped.set()
                elif "dead" in states:
                    stack.revive(home, dashboard=DASHBOARD_COMMAND)
            except StorageError:
                continue  # the next check may succeed; workers report unavailable services

    thread = threading.Thread(target=restart_dead_services, name="keeper", daemon=True)
    thread.start()
    try:
        yield stopped
    finally:
        done.set()
        thread.join()
        if not stopped.is_set():
            with suppress(StorageError):  # the delivery of the records reports it
                _restart_all(home)


def _restart_all(home: Path) -> None:
    """Restart dead services, and wait until all answer: after the search, its records are sent to MLflow."""
    if {"dead", "starting"} & {service.state for service in stack.read_status(home)}:
        stack.up(home, dashboard=DASHBOARD_COMMAND)


_POLL_SECONDS = 0.5
_DOWN_SECONDS = 2.0  # until workers are killed that cannot save their state, because the services were stopped
_INTERRUPTED_UPLOAD_SECONDS = 10.0  # maximum time of the upload to MLflow after Ctrl-C


def open_study_run(services: Services, study: StoredStudy, *, required: bool) -> str | None:
    """Open the study's run in MLflow.

    Args:
        services: services of the study.
        study: the study.
        required: whether an unavailable tracking server is an error.

    Raises:
        StorageError: the tracking server is `required` and unavailable, or the run or experiment was deleted.
    """
    if services.tracking_error:
        return services.tracking_error
    try:
        open_parent_run(study, services.open_tracking())
    except RunDeletedError as error:
        if required:
            raise
        return f"MLflow receives no records of study {study.spec.name!r}: {error}"
    except (MlflowException, LockHeldError, LockLostError) as error:
        reason = f"--tracking-uri {services.tracking_uri}: no run can be opened in MLflow ({describe_error(error)})"
        if required:
            raise TrackingUnavailableError(reason) from None
        return reason
    return None


def check_not_stopped(study: StoredStudy) -> None:
    """Check that the study was not stopped.

    Raises:
        SearchError: the study was stopped.
    """
    if stopped := study.stopped:
        name = study.spec.name
        raise SearchError(f"study {name!r} was stopped {stopped}; resume it with {format_command('start', name)}")


def run_fleet(
    console: Console, services: Services, study: StoredStudy, workers: int, options: WorkerOptions
) -> tuple[bool, tuple[str, ...]]:
    """Run a fleet until no worker is left.

    Returns:
        Whether a signal interrupted the fleet, and one line per worker that gave up, with the reason.

    Raises:
        ServiceUnavailableError: the embedded services were stopped.
    """
    options = options.model_copy(update=dict(services.addresses))
    check_devices(options)
    logs = services.home / "logs" / study.folder  # a deleted study of the same name has another folder
    failed = len(study.trials(TrialState.FAIL))
    name, gpus = study.spec.name, visible_gpus()
    engine = study.engine

    def record_loss(process: str, cause: LossCause) -> None:
        with suppress(SQLAlchemyError):  # without the database, the loss counts in full
            record_loss_cause(engine, process, cause)

    fleet = Fleet(
        name, options, workers=workers, log_dir=logs, gpus=gpus, failed_at_start=failed, study_id=study.study_id,
        on_loss=record_loss,
    )  # fmt: skip
    others = (
        f", first log: {fleet.slots[0].log.name}; another run writes the earlier logs" if fleet.slots[0].index else ""
    )
    console.print(f"worker logs: {logs}{others}")
    has_printed_stop = False
    progress, is_outage = Progress(study.spec.n_trials), False

    def poll_progress() -> tuple[Progress, bool]:
        try:
            return read_progress(engine, study.study_id, study.spec.direction, retry_seconds=0.0), False
        except DataError:  # no outage: for example a character that the encoding of the database lacks
            raise
        except DBAPIError:
            return progress, True

    supervisor = supervise_services(services.home) if services.is_embedded else nullcontext()
    with restore_handlers():
        stop = stop_on_signals(*ENDING_SIGNALS, kill=lambda: fleet.stop(kill=True), request=fleet.stop)
        try:
            fleet.start()
            with register_search(logs), supervisor as is_down, LiveView(console, study.spec, fleet, study) as view:
                while fleet.poll(
                    progress.epochs + progress.trials_with_result, is_outage=is_outage, is_done=progress.is_done
                ):
                    progress, is_outage = poll_progress()
                    view.update(progress, is_outage=is_outage)
                    if is_down is not None and is_down.is_set():
                        fleet.stop(within=_DOWN_SECONDS)
                    if stop.is_set() and not has_printed_stop:
                        has_printed_stop = True
                        view.print_line(
                            "stopping: workers finish their epoch and save a checkpoint (Ctrl-C again kills them)"
                        )
                    time.sleep(_POLL_SECONDS)  # not an Event, on whose lock the signal handler would wait
                view.update(poll_progress()[0])
        finally:
            fleet.stop()  # after an internal error, workers save their state
            fleet.close()
    if is_down is not None and is_down.is_set():
        raise ServiceUnavailableError(
            f"the embedded services in {services.home} were stopped during the search; continue with: "
            f"{study.resume_command}"
        )
    return stop.is_set(), fleet.gave_up


@contextmanager
def warn_on_mlflow_error(console: Console, what: str, again: str) -> Iterator[None]:
    """Convert an MLflow error in this block to a printed warning, because such an error must not hide the result.

    Args:
        console: console for the warning.
        what: name of the data that MLflow did not receive, for the warning.
        again: command that sends the data again, for the warning.
    """
    try:
        yield
    except Exception as error:
        console.print(f"MLflow did not receive {what} ({describe_error(error)}); send it with: {again}", style="yellow")


def flush_outbox(console: Console, services: Services, study: StoredStudy, *, interrupted: bool) -> None:
    """Send the study's records in this machine's outbox to all trackers, and print the number of unsent trials."""
    checkpoints = open_checkpoints(study, services.home, services.checkpoint_url)
    tracker = Tracker(study, services.open_tracking(), checkpoints, services.home)

    def resend_winner() -> None:
        resend(study, tracker, checkpoints, only=list_trials_requiring_model(study))  # from lost machines

    with show_steps(console) as show_step:
        patience = _INTERRUPTED_UPLOAD_SECONDS if interrupted else math.inf
        left = tracker.flush(show_step, timeout_seconds=patience, then=(lambda: None) if interrupted else resend_winner)
    study.refresh()
    if left:
        sender, again = tracker.sender, format_command("sync", study.spec.name)
        reason = f" ({sender.unavailable_reason})" if sender.unavailable_reason else ""
        unsent = f"{pluralize(left, 'trial')} not fully sent to {sender.lagging_consumers}"
        console.print(f"{unsent}{reason}; send the rest with: {again}", style="yellow")


def publish_report(
    console: Console, services: Services, study: StoredStudy, *, is_available: bool = True
) -> Path | None:
    """Write the report of a study again, log it to MLflow, and return its path; None if it could not be written.

    The report is not logged if MLflow is known to be unavailable.

    Errors are printed as warnings, because they must not hide the result.
    """
    again = format_command("report", study.spec.name)
    try:
        report = update_report(services, study)
    except (OSError, ImportError) as error:
        console.print(f"the report was not written ({error}); write it with: {again}", style="yellow")
        return None
    if is_available:
        with warn_on_mlflow_error(console, "the report", again):
            log_report(study, report, services.open_available_tracking())
    return report
