"""Retrain finalists, or refit the winner, with a fleet on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from rich.console import Console

from hpsearch.objectives.loading import load_objective
from hpsearch.objectives.own_loop.loop_objective import LoopObjective
from hpsearch.search.console import command, counted, steps
from hpsearch.search.errors import SearchError
from hpsearch.search.finalists.choose import create_or_join, passed_over
from hpsearch.search.finalists.refit import Refit, create_or_join_refit, refit_lines, tabulate_refit
from hpsearch.search.finalists.table import Finalists, read_finalists, tabulate
from hpsearch.search.finalists.text import finalist_lines, finalist_table, opening_line
from hpsearch.search.report.show import last_failure
from hpsearch.search.run.fleet import drive, open_run, require_started, tell_outbox, without_mlflow
from hpsearch.search.services import Services
from hpsearch.search.study.checkpoints import note_checkpoints
from hpsearch.search.study.study import StoredStudy, with_tracking
from hpsearch.search.study.summary import summarise
from hpsearch.search.tracking.publish import close_study
from hpsearch.search.tracking.tracker import check_readers
from hpsearch.search.worker.options import WorkerOptions
from hpsearch.storage.attributes import RUN_URL, TRACKING_URI
from hpsearch.storage.checkpoints.store import Checkpoints
from hpsearch.storage.records.test_openings import read_opening


@dataclass(frozen=True)
class Beside:
    """A study beside a search, whether it was made now, its services, and why MLflow is away where it is."""

    study: StoredStudy
    created: bool
    services: Services
    away: str | None


def open_beside(
    services: Services, search: StoredStudy, options: WorkerOptions, make: Callable[[], tuple[StoredStudy, bool]]
) -> Beside:
    """Create or join a study beside a search, with a run in MLflow.

    Raises:
        SearchError: the search is none, or has nothing to train again.
        StorageError: a service cannot be used.
    """
    if options.checkpoint_url is not None:
        Checkpoints(options.checkpoint_url).check()
    search.require_search("{go_on}")
    services = with_tracking(services, search)
    study, created = make()
    study.set_attr(TRACKING_URI, services.open_tracking().uri)
    away = open_run(services, study, required=False)
    if options.checkpoint_url is not None:
        note_checkpoints(study, options.checkpoint_url)
    return Beside(study, created, services, away)


def train_beside(
    console: Console, beside: Beside, options: WorkerOptions, workers: int
) -> tuple[bool, tuple[str, ...]]:
    """Train the rest with so many workers, and send it to MLflow; return what `drive` returns.

    Raises:
        SearchError: the study was stopped.
        ObjectiveError: the objective cannot be loaded.
    """
    study, services = beside.study, beside.services
    if beside.away:
        console.print(f"{beside.away}; what is logged waits in {services.home / 'outbox'}", style="yellow")
    interrupted, gave_up = False, tuple[str, ...]()
    if workers:
        check_readers(study.spec)
        require_started(study)
        if warning := study.source_warning(load_objective(study.spec.objective)):
            console.print(f"warning: {warning}", style="yellow")
        interrupted, gave_up = drive(console, services, study, workers, options)
    tell_outbox(console, services, study, interrupted=interrupted)
    return interrupted, gave_up


T = TypeVar("T")


@dataclass(frozen=True)
class Trained(Generic[T]):
    """The result of training beside a search: the table, whether a signal ended it, and why workers gave up."""

    table: T
    interrupted: bool = False
    gave_up: tuple[str, ...] = ()


def run_finalists(  # noqa: PLR0913 what a set of finalists is chosen by, by keyword
    services: Services,
    study: StoredStudy,
    options: WorkerOptions,
    *,
    top: int | None,
    seeds: int | None,
    new_set: bool,
    infeasible: bool = False,
    workers: int,
    console: Console,
) -> Trained[Finalists]:
    """Choose or continue the finalists of a study, train the rest of them, print the table and return it.

    Args:
        services: where the study is kept.
        study: the study, whose search is over.
        options: of the workers.
        top, seeds, new_set, infeasible: for :func:`hpsearch.search.finalists.choose.create_or_join`.
        workers: how many; none to choose and show only.
        console: told what happens.

    Raises:
        SearchError: there are no finalists to choose, or the set was stopped.
        ObjectiveError: the objective cannot be loaded.
        StorageError: a service cannot be used.
    """
    make = partial(create_or_join, study, top=top, seeds=seeds, new_set=new_set, infeasible=infeasible)
    with steps(console) as tell:
        tell("choosing the finalists")
        beside = open_beside(services, study, options, make)
    chosen, created = beside.study, beside.created
    _print_begin(console, study, chosen, created=created)
    if (counting := read_finalists(study)) is not None and counting.study != chosen.spec.name:
        stays = f"trial {counting.winner}" if counting.winner is not None else f"trials {counting.front}"
        console.print(f"until these have a winner, that of {counting.study} stays: {stays}", style="yellow")
    interrupted, gave_up = train_beside(console, beside, options, workers if tabulate(study, chosen).pending else 0)
    found = tabulate(study, chosen)
    if not found.pending:
        with without_mlflow(console, "the finalists", command("finalists", study.spec.name)):
            close_study(study, summarise(study), beside.services.open_tracking())
    console.print()
    console.print(finalist_table(study, found))
    for line in finalist_lines(study, found):
        console.print(line)
    if url := study.attrs.get(RUN_URL):
        console.print(f"MLflow, study: {url}")
    for line in last_failure(chosen):
        console.print(f"study {chosen.spec.name}: {line}")
    _print_rest(console, chosen, found.pending, gave_up)
    return Trained(found, interrupted, gave_up)


def _print_begin(console: Console, study: StoredStudy, chosen: StoredStudy, *, created: bool) -> None:
    of = chosen.spec.finalists_of
    assert of is not None
    trials, seeds = ", ".join(map(str, of.trials)), ", ".join(map(str, of.seeds))
    console.print(f"finalists of {study.spec.name}{' (new)' if created else ''}: trials {trials} on the seeds {seeds}")
    opening = read_opening(study.engine, study.study_id)
    if created and opening is not None:
        console.print(f"{opening_line(study, opening)}: another winner could not be tested any more", style="yellow")
    if len(of.trials) < of.top:
        console.print(f"fewer than --top {of.top}: there are no more that are complete, differ and have their weights")
    if created and (gone := passed_over(study, of.top)):
        console.print(
            f"passed over: trial{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))}, for hpsearch gc removed "
            "what could be tested and promoted",
            style="yellow",
        )


def _print_rest(console: Console, study: StoredStudy, pending: int, gave_up: tuple[str, ...]) -> None:
    """Print why workers gave up, and the commands that train the `pending` trials of a study."""
    for line in gave_up:
        console.print(line)
    if pending:
        console.print(f"go on with: {study.go_on}; or join with: {command('worker', '--study', study.spec.name)}")


def run_refit(
    services: Services,
    study: StoredStudy,
    options: WorkerOptions,
    *,
    trial: int | None,
    seeds: int | None,
    workers: int,
    console: Console,
) -> Trained[Refit]:
    """Create or continue the refit of a study's winner, train the rest of it, and return it.

    Args:
        services: where the study is kept.
        study: the search, whose finalists have a winner.
        options: of the workers.
        trial, seeds: for :func:`hpsearch.search.finalists.refit.create_or_join_refit`.
        workers: how many; none to make and show only.
        console: told what happens.

    Raises:
        SearchError: there is no winner, or it trains by a loop of its own; or the refit was stopped.
        ObjectiveError: the objective cannot be loaded.
        StorageError: a service cannot be used.
    """

    def make() -> tuple[StoredStudy, bool]:
        if isinstance(load_objective(study.spec.objective), LoopObjective):
            raise SearchError(
                f"--refit: {study.spec.objective} trains by a loop of its own, which divides its data itself: promote "
                "the winner without --refit"
            )
        return create_or_join_refit(study, seeds=seeds, trial=trial)

    with steps(console) as tell:
        tell("making the refit")
        beside = open_beside(services, study, options, make)
    made, found = beside.study, tabulate_refit(beside.study)
    console.print(
        f"refit of trial {found.of} of {study.spec.name}{' (new)' if beside.created else ''}: "
        f"{counted(found.epochs, 'epoch')} on train and validation, on {counted(len(found.seeds), 'seed')}"
    )
    interrupted, gave_up = train_beside(console, beside, options, workers if found.pending else 0)
    found = tabulate_refit(made)
    for line in refit_lines(made, found):
        console.print(line)
    _print_rest(console, made, found.pending, gave_up)
    return Trained(found, interrupted, gave_up)
