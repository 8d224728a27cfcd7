"""A whole search on this machine: services, study, fleet, live view, summary, report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from optuna.exceptions import StorageInternalError
from rich.console import Console
from rich.text import Text
from sqlalchemy.exc import DBAPIError

from hpsearch.objectives.objective import BaseObjective, Objective
from hpsearch.search.console import command, counted, steps
from hpsearch.search.errors import SearchError
from hpsearch.search.report import write_report
from hpsearch.search.report.show import summary_lines
from hpsearch.search.run.fleet import drive, open_run, require_started, tell_outbox, without_mlflow
from hpsearch.search.services import Services
from hpsearch.search.study.create import start_clock
from hpsearch.search.study.enqueue import waits_in_vain
from hpsearch.search.study.smoke import smoke_test
from hpsearch.search.study.study import StoredStudy, report_path, require_measurable, with_tracking
from hpsearch.search.study.summary import Summary, summarise
from hpsearch.search.tracking.publish import close_study
from hpsearch.search.worker.options import WorkerOptions
from hpsearch.storage.attributes import RUN_ID, STOPPED


@dataclass(frozen=True)
class Ran:
    """What a run came to.

    Attributes:
        summary: the study as the run left it.
        report: its page; None where it could not be written.
        interrupted: whether a signal ended the run; its trials were saved.
        stopped: who stopped the study, and when; empty when nobody did.
        over: whether no trial is to come: the budget is spent, or the time is up.
        gave_up: of each worker that gave up, a line that says why.
    """

    summary: Summary
    report: Path | None = None
    interrupted: bool = False
    stopped: str = ""
    over: bool = False
    gave_up: tuple[str, ...] = ()


def run_search(
    services: Services, study: StoredStudy, options: WorkerOptions, *, workers: int, created: bool, console: Console
) -> Ran:
    """Run a study with a fleet of such workers until its budget is spent, its time is up, or it is stopped.

    Args:
        services: where the study is kept.
        study: the study.
        options: of the workers.
        workers: how many; with none the study is only made ready.
        created: whether it is a new one, to tell.
        console: told what happens.

    Raises:
        SearchError: the study was stopped before, or was deleted meanwhile, or its database went away.
        ObjectiveError: the objective cannot be loaded.
        StorageError: a service cannot be used.
    """
    spec = study.spec
    require_started(study)
    with steps(console) as tell:
        if workers:
            require_measurable(spec, options.device)
        objective = study.objective()
        services = with_tracking(services, study, required=options.tracking_required)
        start_clock(study)
        away = open_run(services, study, required=options.tracking_required)
        if isinstance(objective, Objective):
            tell("overfitting one batch")
        smoke_warning = smoke_test(study, objective, None if away else services.open_tracking())
    begin = summarise(study)
    _tell_begin(console, study, objective, begin, workers=workers, created=created)
    if away:
        console.print(f"{away}; the search goes on, what it logs waits in {services.home / 'outbox'}", style="yellow")
    if smoke_warning:
        console.print(smoke_warning, style="yellow")
    if why := waits_in_vain(study):
        console.print(why, style="yellow")
    if not workers:
        console.print(f"join it with: {command('worker', '--study', spec.name)}")
        return Ran(begin)
    interrupted, gave_up = False, tuple[str, ...]()
    spent = study.is_spent(begin.finished)
    if not spent or (spec.metered and begin.waiting):  # what waits is settled
        interrupted, gave_up = drive(console, services, study, workers, options)
    else:
        given_up = study.given_up
        more = command("extend", spec.name, *_more(study, begin)) if given_up is None else command("start", spec.name)
        over = "the budget is spent" if given_up is None else given_up.why
        console.print(f"{over}; more trials with: {more}; or choose another --name for a new search")
    return _finish(console, services, study, interrupted=interrupted, gave_up=gave_up)


def _more(study: StoredStudy, begin: Summary) -> tuple[str, str]:
    """Return the option of `extend` for as much again of the budget that is spent."""
    spec, spending = study.spec, study.spending
    if begin.finished >= study.budget or spending is None:
        return "--trials", f"+{spec.n_trials}"
    if spending.budget_epochs is not None and spending.epochs >= spending.budget_epochs:
        return "--budget-epochs", f"+{spending.budget_epochs}"
    return "--budget-seconds", f"+{max(round(spending.budget_seconds or 0), 1)}"


def _tell_begin(
    console: Console, study: StoredStudy, objective: BaseObjective, begin: Summary, *, workers: int, created: bool
) -> None:
    spec, at = study.spec, "new" if created else f"{begin.finished} of its trials are done"
    what = f" ({at}): {spec.budgets} of {spec.objective}, {counted(workers, 'worker')}"
    console.print(Text.assemble("study ", (spec.name, "bold"), what))
    if spec.warm_start is not None:
        console.print(f"it learns from the trials of {', '.join(spec.warm_start)} too, as they were when it was made")
    if warning := study.source_warning(objective):
        console.print(f"warning: {warning}", style="yellow")


def _finish(
    console: Console, services: Services, study: StoredStudy, *, interrupted: bool, gave_up: tuple[str, ...]
) -> Ran:
    """Send the result to MLflow and the dashboard, write the report, print the summary."""
    try:
        summary = summarise(study)
    except KeyError:
        raise SearchError(f"study {study.spec.name!r} was deleted while it ran") from None
    except (DBAPIError, StorageInternalError):
        raise SearchError(
            "the study's database does not answer: start it, and run the same command again to go on"
        ) from None
    report: Path | None = None
    with without_mlflow(console, "the end of the study", command("report", study.spec.name)):
        tell_outbox(console, services, study, interrupted=interrupted)
        summary = summarise(study)
        tracking = services.open_tracking()
        close_study(study, summary, tracking)
        report = report_path(services, study)
        write_report(study, report, dashboard_url=services.dashboard_url)
        tracking.log_file(str(study.attrs[RUN_ID]), report)
    console.print()
    for line in summary_lines(study, summary, dashboard_url=services.dashboard_url):
        console.print(line)
    if report is not None:
        console.print(f"report:             {report}")
    for line in gave_up:
        console.print(line)
    stopped, over = str(study.attrs.get(STOPPED) or ""), study.is_spent(summary.finished)
    if interrupted:
        console.print(f"interrupted; go on with: {study.go_on}")
    elif stopped:
        console.print(f"stopped {stopped}; go on with: {command('start', study.spec.name)}, then run it again")
    elif not over and study.spec.timeout is not None and not gave_up:
        console.print(f"the timeout of {study.spec.timeout:g} s ended the search before its budget")
        over = True
    return Ran(summary, report, interrupted, stopped, over, gave_up)
