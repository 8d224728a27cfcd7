"""A search on this machine: services, study, fleet, live view, summary and report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from optuna.exceptions import StorageInternalError
from optuna.trial import TrialState
from rich.console import Console
from rich.text import Text
from sqlalchemy.exc import DBAPIError

from hpsearch.objectives.base_objective import BaseObjective
from hpsearch.objectives.objective import Objective
from hpsearch.objectives.training.checks.smoke import SmokeResult
from hpsearch.search.console import format_command, pluralize, show_steps
from hpsearch.search.errors import SearchError
from hpsearch.search.pruners.pbt import PBT
from hpsearch.search.report.headline import make_extend_options
from hpsearch.search.report.show import format_summary, print_lines
from hpsearch.search.run.fleet import (
    check_not_stopped,
    flush_outbox,
    open_study_run,
    publish_report,
    run_fleet,
    warn_on_mlflow_error,
)
from hpsearch.search.services import Services
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.study.create import start_timeout
from hpsearch.search.study.enqueue import find_stopped_warning
from hpsearch.search.study.preflight import run_random_smoke_test, smoke_test
from hpsearch.search.study.study import StoredStudy, require_measurable
from hpsearch.search.study.study_tracking import resolve_tracking
from hpsearch.search.study.summary import Summary, summarise
from hpsearch.search.tracking.study_run import close_study
from hpsearch.search.worker.options import WorkerOptions
from hpsearch.storage.attributes import DEVICES
from hpsearch.storage.database.retry import limit_retries
from hpsearch.storage.errors import ServiceUnavailableError
from hpsearch.storage.mlflow.health import TrackingUnavailableError
from hpsearch.storage.trials.history import read_attempts


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    Attributes:
        summary: summary of the study at the end of the run.
        report_path: path of the report; None if it was not written.
        is_interrupted: whether a signal ended the run; its trials were saved.
        stopped: user and time of a stop request; None if the study was not stopped.
        is_finished: whether the budget is spent or the timeout has expired.
        gave_up: one line per worker that gave up, with the reason.
    """

    summary: Summary
    report_path: Path | None = None
    is_interrupted: bool = False
    stopped: str | None = None
    is_finished: bool = False
    gave_up: tuple[str, ...] = ()


def run_search(  # noqa: PLR0913 keywords
    services: Services,
    study: StoredStudy,
    options: WorkerOptions,
    *,
    workers: int,
    created: bool,
    console: Console,
    delete_rejected: bool = False,
    loaded: BaseObjective | None = None,
    run_test: Callable[[BaseObjective, StudySpec], SmokeResult] = run_random_smoke_test,
) -> RunResult:
    """Run a study with a fleet until its budget is spent, its timeout expires, or it is stopped.

    Args:
        services: services of the study.
        study: the study.
        options: options of the workers.
        workers: number of workers; 0 only prepares the study.
        created: whether the study is new.
        console: console for the live view and the result.
        delete_rejected: whether to delete the study if an error prevents its first trials.
        loaded: the objective, if this process has loaded it before; see `StoredStudy.objective`.
        run_test: function that runs the smoke test.

    Raises:
        SearchError: the study was already stopped, or it was deleted during the run.
        ServiceUnavailableError: the database became unavailable.
        KeyboardInterrupt: a signal interrupted the run, and the database is unavailable.
        ObjectiveError: the objective cannot be loaded.
        StorageError: a service is unusable.
    """
    spec = study.spec
    check_not_stopped(study)
    with show_steps(console) as show_step, _delete_rejected(study, is_enabled=delete_rejected):
        if workers:
            require_measurable(spec, options.device)
        objective = study.objective(loaded=loaded)
        services = resolve_tracking(services, study, required=options.tracking_required)
        start_timeout(study)
        tracking_error = open_study_run(services, study, required=options.tracking_required)
        if isinstance(objective, Objective):
            show_step("smoke test: overfitting one batch")
        tracking = None if tracking_error else services.open_tracking()
        smoke_warning = smoke_test(study, objective, tracking, run_test=run_test)
    begin = summarise(study)
    _print_begin(console, study, objective, begin, workers=workers, created=created)
    if tracking_error:
        outbox = services.home / "outbox"
        console.print(f"{tracking_error}; the search continues, and unsent records are in {outbox}", style="yellow")
    if smoke_warning:
        console.print(smoke_warning, style="yellow")
    if DEVICES not in study.attrs:
        study.set_attr(DEVICES, options.devices)
    if workers and (warning := study.find_devices_warning(options.devices)):
        console.print(f"warning: {warning}", style="yellow")
    if warning := find_stopped_warning(study):
        console.print(warning, style="yellow")
    if not workers:
        console.print(f"start workers with: {format_command('worker', '--study', spec.name)}")
        return RunResult(begin)
    interrupted, gave_up = False, tuple[str, ...]()
    spent = study.is_spent(begin.finished)
    if not spent or (spec.has_epoch_or_time_budget and begin.waiting):  # workers end the waiting trials
        interrupted, gave_up = run_fleet(console, services, study, workers, options)
    elif spec.pruner.shares_checkpoints:
        console.print("all trials of the population have ended; start a new study with another --name")
    else:
        early_stop = study.early_stop
        again = (
            ("extend", spec.name, *make_extend_options(study, begin)) if early_stop is None else ("start", spec.name)
        )
        reason = "the budget is spent" if early_stop is None else early_stop.reason
        console.print(f"{reason}; continue with: {format_command(*again)}; or start a new study with another --name")
    with limit_retries(_INTERRUPTED_RETRY_SECONDS if interrupted else math.inf):
        return _finish_search(console, services, study, interrupted=interrupted, gave_up=gave_up)


@contextmanager
def _delete_rejected(study: StoredStudy, *, is_enabled: bool) -> Iterator[None]:
    """Delete the study if the block raises and no trial has started, unless the database is unavailable."""
    try:
        yield
    except Exception as error:  # of the objective, a service or hpsearch itself
        is_away = isinstance(error, (StorageInternalError, DBAPIError, ServiceUnavailableError))
        if is_enabled and (not is_away or isinstance(error, TrackingUnavailableError)):
            with suppress(StorageInternalError, DBAPIError, KeyError):  # such as a study that was deleted
                if all(trial.state == TrialState.WAITING for trial in study.trials()):
                    study.storage.delete_study(study.study_id)
        raise


def _print_begin(
    console: Console, study: StoredStudy, objective: BaseObjective, begin: Summary, *, workers: int, created: bool
) -> None:
    spec, at = study.spec, "new" if created else f"{begin.finished} trials finished"
    folds = "" if spec.folds is None else f" with {spec.folds} folds each"
    details = f" ({at}): {spec.budget_description} of {spec.objective}{folds}, {pluralize(workers, 'worker')}"
    console.print(Text.assemble("study ", (spec.name, "bold"), details))
    if isinstance(spec.pruner, PBT):
        console.print(f"pbt changes during the training: {', '.join(spec.pruner.parameters or ())}")
    if spec.warm_start is not None:
        console.print(f"warm start: the sampler uses the earlier trials of {', '.join(spec.warm_start)}")
    if warning := study.source_warning(objective):
        console.print(f"warning: {warning}", style="yellow")


_INTERRUPTED_RETRY_SECONDS = 10.0  # for the database after a signal


def _list_foreign_trials(study: StoredStudy) -> list[int]:
    """Return the numbers of running trials without an attempt, which no worker of hpsearch runs or ends."""
    running = study.trials(TrialState.RUNNING)
    attempts = read_attempts(study.engine, [trial._trial_id for trial in running])
    return [trial.number for trial in running if not attempts.get(trial._trial_id)]


def _finish_search(
    console: Console, services: Services, study: StoredStudy, *, interrupted: bool, gave_up: tuple[str, ...]
) -> RunResult:
    """Send the result to MLflow and the dashboard, write the report, and print the summary."""
    try:
        summary = summarise(study)
    except KeyError:
        raise SearchError(f"study {study.spec.name!r} was deleted while it ran") from None
    except (DBAPIError, StorageInternalError):
        fault = f"the database is unavailable; start the database, and continue with: {study.resume_command}"
        if interrupted:
            console.print(fault)
            raise KeyboardInterrupt from None
        raise ServiceUnavailableError(fault) from None
    tracking = None
    with warn_on_mlflow_error(
        console, "the result and the report of the study", format_command("report", study.spec.name)
    ):
        flush_outbox(console, services, study, interrupted=interrupted)
        summary = summarise(study)
        tracking = services.open_available_tracking()
        close_study(study, summary, tracking)
    report = publish_report(console, services, study, is_available=tracking is not None)
    console.print()
    print_lines(console, format_summary(study, summary, dashboard_url=services.dashboard_url))
    if report is not None:
        console.print(f"report:             {report}")
    for line in gave_up:
        console.print(line)
    stopped, is_finished = study.stopped, study.is_spent(summary.finished)
    if interrupted:
        console.print(f"interrupted; continue with: {study.resume_command}")
    elif stopped:
        console.print(f"study stopped {stopped}; to continue, first run {format_command('start', study.spec.name)}")
    elif not is_finished and study.spec.timeout is not None and not gave_up:
        console.print(f"the timeout of {study.spec.timeout:g} s ended the search before its budget")
        is_finished = True
    elif not is_finished and (foreign := _list_foreign_trials(study)):
        console.print(
            f"started by Optuna's ask() and not ended: {', '.join(f'trial {number}' for number in foreign)}; "
            "end them with Optuna's tell(), and repeat the command"
        )
    elif not is_finished:  # without `gave_up`, the budget was extended when the last worker had ended
        remedy = "correct the objective or its surroundings, and " if gave_up else ""
        console.print(f"not finished; {remedy}continue with: {study.resume_command}")
    return RunResult(summary, report, interrupted, stopped, is_finished, gave_up)
