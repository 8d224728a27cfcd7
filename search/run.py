"""A whole search on this machine: services, study, fleet, live view, summary, report."""

from __future__ import annotations

import math
import signal
import threading
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

from mlflow.exceptions import MlflowException
from optuna.exceptions import StorageInternalError
from rich.console import Console
from rich.text import Text
from sqlalchemy.exc import DBAPIError

from search.closing import close_study
from search.console import PlainConsole, command, counted
from search.errors import SearchError
from search.fleet import Fleet, Slot, visible_gpus
from search.keeper import kept_up
from search.launch import load_for_search, prepare_study
from search.live import LiveView
from search.parent_run import open_parent_run
from search.report import write_report
from search.resending import resend
from search.services import Services, find_services
from search.smoke_test import smoke_test
from search.steps import steps
from search.study import RUN_ID, StudyHandle
from search.study_checkpoints import note_checkpoints, open_checkpoints
from search.summary import summarise, summary_lines
from search.tracker import Tracker
from storage.answers import TrackingAwayError, one_line
from storage.checkpoints import Checkpoints
from storage.claims import STOPPED
from storage.locks import LockHeldError, LockLostError
from storage.progress import Progress, read_progress
from storage.studies import engine_of
from storage.tracking import RunDeletedError

_POLL = 0.5  # seconds
_GRACE = 10.0  # seconds for MLflow after Ctrl-C


def run_search(
    settings: dict[str, Any],
    *,
    workers: int,
    storage_url: str | None,
    tracking_uri: str | None,
    checkpoint_url: str | None,
    home: str | None,
    tracking_required: bool = False,
    system_metrics: bool = False,
) -> int:
    """Run the search that `settings` describe and return the exit code.

    Returns:
        0 when the budget is spent (or the time is up) and a trial is complete, 130 after Ctrl-C, else 1.
    """
    console = PlainConsole()
    if checkpoint_url is not None:
        Checkpoints(checkpoint_url).check()
    with steps(console) as tell:
        tell("loading the objective")
        settings, objective = load_for_search(settings)
        services = find_services(
            storage_url, tracking_uri, home=home, both=True, tracking_required=tracking_required, progress=tell
        )
        tell("opening the study")
        handle, created = prepare_study(services, settings, objective)
        if checkpoint_url is not None:
            note_checkpoints(handle, checkpoint_url)
        spec = handle.spec
        if why := handle.attrs.get(STOPPED):
            raise SearchError(f"study {spec.name!r} was stopped {why}: start it with {command('start', spec.name)}")
        away = open_run(services, handle, required=tracking_required)
        tell("overfitting one batch")
        smoke_warning = smoke_test(handle, objective, None if away else services.open_tracking())
    begin = summarise(handle)
    at = "new" if created else f"{begin.finished} of its trials are done"
    what = f" ({at}): {counted(spec.n_trials, 'trial')} of {spec.objective}, {counted(workers, 'worker')}"
    console.print(Text.assemble("study ", (spec.name, "bold"), what))
    if warning := handle.source_warning(objective):
        console.print(f"warning: {warning}", style="yellow")
    if away:
        console.print(f"{away}; the search goes on, what it logs waits in {services.home / 'outbox'}", style="yellow")
    if smoke_warning:
        console.print(smoke_warning, style="yellow")
    if not workers:
        console.print(f"join it with: {command('worker', '--study', spec.name)}")
        return 0
    if begin.finished < spec.n_trials:
        interrupted, fleet = drive(console, services, handle, workers, checkpoint_url, system_metrics=system_metrics)
    else:
        more = command("extend", spec.name, "--trials", f"+{spec.n_trials}")
        console.print(f"the budget is spent; more trials with: {more}; or choose another --name for a new search")
        interrupted, fleet = False, None
    return _finish(console, services, handle, interrupted=interrupted, fleet=fleet)


def open_run(services: Services, handle: StudyHandle, *, required: bool) -> str | None:
    """Make the study's run in MLflow; return why it cannot be made now, where that is no reason to wait.

    Raises:
        StorageError: the tracking server is `required`, or somebody deleted the experiment.
    """
    if services.tracking_away:
        return services.tracking_away
    try:
        open_parent_run(handle, services.open_tracking())
    except RunDeletedError as error:
        if required:
            raise
        return f"MLflow is told nothing of study {handle.spec.name!r}: {error}"
    except (MlflowException, LockHeldError, LockLostError) as error:
        away = f"--tracking-uri {services.tracking_uri}: no run can be opened in MLflow ({one_line(error)})"
        if required:
            raise TrackingAwayError(away) from None
        return away
    return None


def drive(
    console: Console,
    services: Services,
    handle: StudyHandle,
    workers: int,
    checkpoint_url: str | None,
    *,
    system_metrics: bool = False,
) -> tuple[bool, Fleet]:
    """Run the fleet until no worker is left; return whether it was interrupted, and the fleet."""
    assert services.tracking_uri is not None
    environment = {
        "HPSEARCH_STORAGE_URL": services.storage_url,
        "HPSEARCH_TRACKING_URI": services.tracking_uri,
        "HPSEARCH_HOME": str(services.home),
    }
    if checkpoint_url is not None:
        environment["HPSEARCH_CHECKPOINT_URL"] = checkpoint_url
    if system_metrics:
        environment["HPSEARCH_SYSTEM_METRICS"] = "1"
    logs = services.home / "logs" / handle.spec.name
    fleet = Fleet(handle.spec.name, workers=workers, environment=environment, log_dir=logs, gpus=visible_gpus())
    others = f", from {fleet.slots[0].log.name} on: another run writes those before" if fleet.slots[0].index else ""
    console.print(f"worker logs: {logs}{others}")
    engine = engine_of(handle.storage)
    wake = threading.Event()
    signals = 0

    def on_signal(_signum: int, _frame: FrameType | None) -> None:
        nonlocal signals
        signals += 1
        fleet.stop(kill=signals > 1)
        wake.set()

    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, on_signal) for number in handled}
    told = False
    progress, away = Progress(handle.spec.n_trials), False

    def look() -> tuple[Progress, bool]:
        try:
            return read_progress(engine, handle.study_id, handle.spec.direction), False
        except DBAPIError:
            return progress, True

    keeper = kept_up(services.home) if services.embedded else nullcontext()
    try:
        fleet.start()
        with keeper as kept, LiveView(console, handle.spec, fleet) as view:
            while fleet.poll(progress.with_result, away=away):
                progress, away = look()
                view.update(progress, away=away)
                if kept is not None and kept.is_set():
                    fleet.stop()
                if signals and not told:
                    told = True
                    view.say("stopping: workers end their epoch and save (again to kill them)")
                wake.wait(_POLL)
                wake.clear()
            view.update(look()[0])
    finally:
        fleet.stop()  # on an error of ours they save what they have
        fleet.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    return signals > 0, fleet


def _finish(
    console: Console, services: Services, handle: StudyHandle, *, interrupted: bool, fleet: Fleet | None
) -> int:
    """Tell MLflow and the dashboard what came of it, write the report, print the summary."""
    try:
        summary = summarise(handle)
    except KeyError:
        raise SearchError(f"study {handle.spec.name!r} was deleted while it ran") from None
    except (DBAPIError, StorageInternalError):
        raise SearchError(
            "the study's database does not answer: start it, and run the same command again to go on"
        ) from None
    report: Path | None = None
    try:
        tell_outbox(console, services, handle, interrupted=interrupted)
        summary = summarise(handle)
        tracking = services.open_tracking()
        close_study(handle, summary, tracking)
        report = report_path(services, handle)
        write_report(handle, report, dashboard_url=services.dashboard_url)
        tracking.log_file(str(handle.attrs[RUN_ID]), report)
    except Exception as error:  # the search is done: a server that is away must not hide its result
        reason, again = one_line(error), command("report", handle.spec.name)
        console.print(f"MLflow was not told the end of the study ({reason}); tell it with: {again}", style="yellow")
    console.print()
    for line in summary_lines(handle, summary, dashboard_url=services.dashboard_url):
        console.print(line)
    if report is not None:
        console.print(f"report:             {report}")
    failed = tell_failed(console, fleet)
    if interrupted:
        console.print(f"interrupted; go on with: {handle.go_on}")
        return 130
    if why := handle.attrs.get(STOPPED):
        console.print(f"stopped {why}; go on with: {command('start', handle.spec.name)}, then run it again")
        return 1
    spent = summary.finished >= handle.budget
    if not spent and handle.spec.timeout is not None and not failed:
        console.print(f"the timeout of {handle.spec.timeout:g} s ended the search before its budget")
        spent = True
    return 0 if spent and summary.best is not None else 1


def tell_failed(console: Console, fleet: Fleet | None) -> list[Slot]:
    """Print which workers gave up, and why, and return their places."""
    failed = [slot for slot in fleet.slots if slot.state == "failed"] if fleet else []
    for slot in failed:
        console.print(
            f"worker {slot.index} gave up (exit code {slot.exit_code}): {slot.complaint()}; log: {slot.log}",
        )
    return failed


def tell_outbox(console: Console, services: Services, handle: StudyHandle, *, interrupted: bool) -> None:
    """Send MLflow what of the study waits on this machine, and print what is left."""
    checkpoints = open_checkpoints(handle, services.home, None)
    tracker = Tracker(handle, services.open_tracking(), checkpoints, services.home)

    def winner() -> None:
        # Of all the trials of machines that are gone, the one that must not be without a model.
        best = summarise(handle).best
        resend(handle, tracker, checkpoints, only=[] if best is None else [best.number])

    with steps(console) as tell:
        patience = _GRACE if interrupted else math.inf
        left = tracker.deliver(tell, patience=patience, then=(lambda: None) if interrupted else winner)
    if left:
        why = f" ({tracker.sender.away})" if tracker.sender.away else ""
        again = command("sync", handle.spec.name)
        console.print(
            f"MLflow has not been told all of {left} trials{why}; send the rest with: {again}", style="yellow"
        )


def report_path(services: Services, handle: StudyHandle) -> Path:
    """Return where the report of a study is written by default."""
    return services.home / "reports" / f"{handle.spec.name}.html"
