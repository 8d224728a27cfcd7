"""Retrain finalists or refit the winner with a fleet on this machine.

Finalists and refits are trained in a separate study, the companion study of the search.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.console import Console

from hpsearch.objectives.base_objective import BaseObjective
from hpsearch.objectives.custom_loop.loop_objective import LoopObjective
from hpsearch.search.console import PlainConsole, format_command, pluralize, show_steps
from hpsearch.search.errors import SearchError
from hpsearch.search.finalists.choose import (
    check_generated,
    create_or_join,
    list_excluded_trials,
    make_or_join_refit,
)
from hpsearch.search.finalists.refit import Refit, format_refit, tabulate_refit
from hpsearch.search.finalists.table import Finalists, read_finalists, tabulate_finalists
from hpsearch.search.finalists.text import (
    finalist_table,
    format_data_warnings,
    format_finalists,
    format_test_result,
)
from hpsearch.search.report.show import format_last_failure
from hpsearch.search.run.fleet import (
    check_not_stopped,
    flush_outbox,
    open_study_run,
    publish_report,
    run_fleet,
    warn_on_mlflow_error,
)
from hpsearch.search.services import Services
from hpsearch.search.study.checkpoints import check_checkpoint_url, store_checkpoint_url
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.study_tracking import resolve_tracking
from hpsearch.search.study.summary import summarise
from hpsearch.search.tracking.study_run import close_study
from hpsearch.search.tracking.tracker import check_trackers
from hpsearch.search.worker.options import WorkerOptions
from hpsearch.storage.attributes import RUN_URL, TRACKING_URI
from hpsearch.storage.checkpoints.store import CheckpointStore
from hpsearch.storage.records.test_evaluations import read_test_evaluation


@dataclass(frozen=True)
class CompanionStudy:
    """A finalist or refit study of a search, with its services.

    Attributes:
        study: the companion study.
        is_new: whether the companion study is new.
        services: services of the companion study.
        tracking_error: why MLflow is unavailable; None if it answers.
    """

    study: StoredStudy
    is_new: bool
    services: Services
    tracking_error: str | None


def open_companion_study(
    services: Services, search: StoredStudy, options: WorkerOptions, make: Callable[[], tuple[StoredStudy, bool]]
) -> CompanionStudy:
    """Create or join the companion study of a search, and open its run in MLflow.

    Args:
        services: services of the search.
        search: the search.
        options: options of the workers.
        make: function that creates or joins the companion study; returns the study, and whether it is new.

    Raises:
        SearchError: `search` is itself a companion study, or has no trial to retrain; or the user has to confirm the
            settings of a restored study.
        StorageError: a service is unusable.
    """
    if options.checkpoint_url is not None:
        CheckpointStore(options.checkpoint_url).check()
    search.require_search("continue with {resume_command}")
    search.check_restored()  # before `make`, which would leave a set without results
    services = resolve_tracking(services, search)
    study, created = make()
    check_generated(search, study)
    study.check_restored()  # the backup may contain other settings of this study, and records to send
    study.set_attr(TRACKING_URI, services.open_tracking().uri)
    tracking_error = open_study_run(services, study, required=False)
    if options.checkpoint_url is not None:
        store_checkpoint_url(study, options.checkpoint_url)
    return CompanionStudy(study, created, services, tracking_error)


def train_companion_study(
    console: Console, companion: CompanionStudy, options: WorkerOptions, workers: int
) -> tuple[bool, tuple[str, ...]]:
    """Train the remaining trials of a companion study and send their records to MLflow.

    Args:
        console: console for the live view.
        companion: the companion study.
        options: options of the workers.
        workers: number of workers; 0 trains nothing.

    Returns:
        Whether a signal interrupted the training, and one line per worker that gave up, with the reason.

    Raises:
        SearchError: the study was stopped.
        ObjectiveError: the objective cannot be loaded.
    """
    study, services = companion.study, companion.services
    if companion.tracking_error:
        outbox = services.home / "outbox"
        console.print(f"{companion.tracking_error}; unsent records are in {outbox}", style="yellow")
    interrupted, gave_up = False, tuple[str, ...]()
    if workers:
        check_trackers(study.spec)
        check_not_stopped(study)
        if warning := study.source_warning(_load_objective(services, study, options)):
            console.print(f"warning: {warning}", style="yellow")
        interrupted, gave_up = run_fleet(console, services, study, workers, options)
    flush_outbox(console, services, study, interrupted=interrupted)
    return interrupted, gave_up


def _load_objective(services: Services, study: StoredStudy, options: WorkerOptions) -> BaseObjective:
    """Load the objective of a study, and check that workers may load its checkpoints; the workers check it too.

    Raises:
        SearchError: the user has to confirm the objective or its checkpoints.
        ObjectiveError: the objective cannot be loaded.
    """
    objective = study.objective()
    study.check_restored(objective)
    check_checkpoint_url(study, objective, services.home, options.checkpoint_url)
    return objective


T = TypeVar("T")


@dataclass(frozen=True)
class RetrainResult(Generic[T]):
    """The result of training a companion study.

    Attributes:
        result: the table of the finalists, or the refit.
        is_interrupted: whether a signal ended the training.
        gave_up: one line per worker that gave up, with the reason.
    """

    result: T
    is_interrupted: bool = False
    gave_up: tuple[str, ...] = ()


def run_finalists(  # noqa: PLR0913 the options that select finalists are keywords
    services: Services,
    study: StoredStudy,
    options: WorkerOptions,
    *,
    top: int | None,
    seeds: int | None,
    new_set: bool,
    infeasible: bool = False,
    workers: int,
) -> RetrainResult[Finalists]:
    """Choose finalists or continue the existing set, train the remaining trials, and print and return the results.

    Args:
        services: services of the study.
        study: the study, whose search has ended.
        options: options of the workers.
        top: number of finalists; None uses the number of the existing set, or the default.
        seeds: number of new seeds; None uses the number of the existing set, or the default.
        new_set: whether to choose a new set of finalists.
        infeasible: whether trials that violate a constraint may be chosen.
        workers: number of workers; 0 only chooses and shows the finalists.

    Raises:
        SearchError: the study has no trials to choose from, or the finalists were stopped.
        ObjectiveError: the objective cannot be loaded.
        StorageError: a service is unusable.
    """

    def make_finalists() -> tuple[StoredStudy, bool]:
        if workers:  # else a rejected objective would leave a set without results
            _load_objective(services, study, options)
        return create_or_join(study, top=top, seeds=seeds, new_set=new_set, infeasible=infeasible)

    console = PlainConsole(outlives_pipe=True)
    with show_steps(console) as show_step:
        show_step("opening the finalists")
        companion = open_companion_study(services, study, options, make_finalists)
    chosen, created = companion.study, companion.is_new
    _print_finalists(console, study, chosen, created=created)
    if (effective := read_finalists(study)) is not None and effective.study != chosen.spec.name:
        winner = (
            f"trial {effective.winner}" if effective.winner is not None else f"Pareto front {list(effective.front)}"
        )
        console.print(f"until the new finalists have a winner, {winner} of {effective.study} remains", style="yellow")
    pending = tabulate_finalists(study, chosen).pending
    interrupted, gave_up = train_companion_study(console, companion, options, workers if pending else 0)
    found = tabulate_finalists(study, chosen)
    if not found.pending:
        with warn_on_mlflow_error(console, "the finalists", format_command("finalists", study.spec.name)):
            close_study(study, summarise(study), companion.services.open_available_tracking())
    report = publish_report(console, companion.services, study)
    console.print()
    console.print(finalist_table(study, found))
    for line in [*format_data_warnings(study), *format_finalists(study, found)]:
        console.print(line)
    if url := study.attrs.get(RUN_URL):
        console.print(f"MLflow, study: {url}")
    if report is not None:
        console.print(f"report:        {report}")
    for line in format_last_failure(chosen):
        console.print(f"study {chosen.spec.name}: {line}")
    _print_remaining(console, chosen, found.pending, gave_up)
    return RetrainResult(found, interrupted, gave_up)


def _print_finalists(console: Console, study: StoredStudy, chosen: StoredStudy, *, created: bool) -> None:
    of = chosen.finalists_of
    trials, seeds = ", ".join(map(str, of.trials)), ", ".join(map(str, of.seeds))
    console.print(f"finalists of {study.spec.name}{' (new)' if created else ''}: trials {trials} on the seeds {seeds}")
    evaluation = read_test_evaluation(study.engine, study.study_id)
    if created and evaluation is not None:
        console.print(f"{format_test_result(study, evaluation)}; another winner cannot be evaluated", style="yellow")
    if len(of.trials) < of.top:
        console.print(
            f"only {len(of.trials)} finalists (--top {of.top}): no other COMPLETE trial has a distinct configuration "
            "and saved weights"
        )
    if created and (gone := list_excluded_trials(study, of.top)):
        console.print(
            f"skipped trial{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))}: hpsearch gc removed the files "
            "that evaluate-test and promote need",
            style="yellow",
        )


def _print_remaining(console: Console, study: StoredStudy, pending: int, gave_up: tuple[str, ...]) -> None:
    """Print why workers gave up, and the commands that train the `pending` trials of a study."""
    for line in gave_up:
        console.print(line)
    if pending:
        console.print(
            f"continue with: {study.resume_command}; "
            f"or join with: {format_command('worker', '--study', study.spec.name)}"
        )


def run_refit(
    services: Services,
    study: StoredStudy,
    options: WorkerOptions,
    *,
    trial: int | None,
    seeds: int | None,
    workers: int,
) -> RetrainResult[Refit]:
    """Create or continue the refit of a study's winner, train its remaining trials, and return its state.

    Args:
        services: services of the study.
        study: the search, whose finalists have a winner.
        options: options of the workers.
        trial: number of the expected winner; None accepts any winner.
        seeds: number of seeds; None uses the number of the existing refit, or the default.
        workers: number of workers; 0 only creates and shows the refit.

    Raises:
        SearchError: there is no winner, the objective has a custom training loop, or the refit was stopped.
        ObjectiveError: the objective cannot be loaded.
        StorageError: a service is unusable.
    """

    def make_refit() -> tuple[StoredStudy, bool]:
        if isinstance(study.objective(), LoopObjective):
            raise SearchError(
                f"--refit is not available for {study.spec.objective}, whose custom training loop splits its own data; "
                "promote the winner without --refit"
            )
        return make_or_join_refit(study, seeds=seeds, trial=trial)

    console = PlainConsole(outlives_pipe=True)
    with show_steps(console) as show_step:
        show_step("creating the refit")
        companion = open_companion_study(services, study, options, make_refit)
    made, found = companion.study, tabulate_refit(companion.study)
    console.print(
        f"refit of trial {found.search_trial} of {study.spec.name}{' (new)' if companion.is_new else ''}: "
        f"{pluralize(found.epochs, 'epoch')} on training and validation data, {pluralize(len(found.seeds), 'seed')}"
    )
    interrupted, gave_up = train_companion_study(console, companion, options, workers if found.pending else 0)
    found = tabulate_refit(made)
    for line in format_refit(made, found):
        console.print(line)
    _print_remaining(console, made, found.pending, gave_up)
    return RetrainResult(found, interrupted, gave_up)
