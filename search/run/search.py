"""A whole search on this machine: services, study, fleet, live view, summary, report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optuna.exceptions import StorageInternalError
from rich.console import Console
from rich.text import Text
from sqlalchemy.exc import DBAPIError

from search.console import PlainConsole, command, counted
from search.entry import EXIT_INTERRUPTED
from search.errors import SearchError
from search.fleet.fleet import Fleet
from search.publish.study import close_study
from search.report import write_report
from search.report.summary import summary_lines
from search.run.drive import drive, open_run, tell_failed, tell_outbox
from search.services import Services, find_services
from search.steps import steps
from search.study.checkpoints import note_checkpoints
from search.study.folders import report_path
from search.study.prepare import load_for_search, prepare_study
from search.study.smoke import smoke_test
from search.study.study import StoredStudy
from search.study.summary import summarise
from search.worker.join import WorkerOptions
from storage.attributes import RUN_ID, STOPPED
from storage.checkpoints.store import Checkpoints
from storage.mlflow.health import one_line


def run_search(settings: dict[str, Any], options: WorkerOptions, *, workers: int) -> int:
    """Run the search that `settings` describe, with a fleet of such workers, and return the exit code.

    Returns:
        0 when the budget is spent (or the time is up) and a trial is complete, 130 after Ctrl-C, else 1.
    """
    console = PlainConsole()
    if options.checkpoint_url is not None:
        Checkpoints(options.checkpoint_url).check()
    with steps(console) as tell:
        tell("loading the objective")
        settings, objective = load_for_search(settings)
        services = find_services(
            options.storage_url,
            options.tracking_uri,
            home=options.home,
            both=True,
            tracking_required=options.tracking_required,
            progress=tell,
        )
        tell("opening the study")
        study, created = prepare_study(services, settings, objective)
        if options.checkpoint_url is not None:
            note_checkpoints(study, options.checkpoint_url)
        spec = study.spec
        if why := study.attrs.get(STOPPED):
            raise SearchError(f"study {spec.name!r} was stopped {why}: start it with {command('start', spec.name)}")
        away = open_run(services, study, required=options.tracking_required)
        tell("overfitting one batch")
        smoke_warning = smoke_test(study, objective, None if away else services.open_tracking())
    begin = summarise(study)
    at = "new" if created else f"{begin.finished} of its trials are done"
    what = f" ({at}): {counted(spec.n_trials, 'trial')} of {spec.objective}, {counted(workers, 'worker')}"
    console.print(Text.assemble("study ", (spec.name, "bold"), what))
    if warning := study.source_warning(objective):
        console.print(f"warning: {warning}", style="yellow")
    if away:
        console.print(f"{away}; the search goes on, what it logs waits in {services.home / 'outbox'}", style="yellow")
    if smoke_warning:
        console.print(smoke_warning, style="yellow")
    if not workers:
        console.print(f"join it with: {command('worker', '--study', spec.name)}")
        return 0
    if begin.finished < spec.n_trials:
        interrupted, fleet = drive(console, services, study, workers, options)
    else:
        more = command("extend", spec.name, "--trials", f"+{spec.n_trials}")
        console.print(f"the budget is spent; more trials with: {more}; or choose another --name for a new search")
        interrupted, fleet = False, None
    return _finish(console, services, study, interrupted=interrupted, fleet=fleet)


def _finish(console: Console, services: Services, study: StoredStudy, *, interrupted: bool, fleet: Fleet | None) -> int:
    """Tell MLflow and the dashboard what came of it, write the report, print the summary."""
    try:
        summary = summarise(study)
    except KeyError:
        raise SearchError(f"study {study.spec.name!r} was deleted while it ran") from None
    except (DBAPIError, StorageInternalError):
        raise SearchError(
            "the study's database does not answer: start it, and run the same command again to go on"
        ) from None
    report: Path | None = None
    try:
        tell_outbox(console, services, study, interrupted=interrupted)
        summary = summarise(study)
        tracking = services.open_tracking()
        close_study(study, summary, tracking)
        report = report_path(services, study)
        write_report(study, report, dashboard_url=services.dashboard_url)
        tracking.log_file(str(study.attrs[RUN_ID]), report)
    except Exception as error:  # the search is done: a server that is away must not hide its result
        reason, again = one_line(error), command("report", study.spec.name)
        console.print(f"MLflow was not told the end of the study ({reason}); tell it with: {again}", style="yellow")
    console.print()
    for line in summary_lines(study, summary, dashboard_url=services.dashboard_url):
        console.print(line)
    if report is not None:
        console.print(f"report:             {report}")
    failed = tell_failed(console, fleet)
    if interrupted:
        console.print(f"interrupted; go on with: {study.go_on}")
        return EXIT_INTERRUPTED
    if why := study.attrs.get(STOPPED):
        console.print(f"stopped {why}; go on with: {command('start', study.spec.name)}, then run it again")
        return 1
    spent = summary.finished >= study.budget
    if not spent and study.spec.timeout is not None and not failed:
        console.print(f"the timeout of {study.spec.timeout:g} s ended the search before its budget")
        spent = True
    return 0 if spent and summary.best is not None else 1
