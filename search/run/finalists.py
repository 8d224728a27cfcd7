"""Training the finalists of a study with a fleet on this machine, as `run` does a search."""

from __future__ import annotations

from dataclasses import dataclass

from optuna.trial import TrialState
from rich.console import Console

from hpsearch.search.console import command
from hpsearch.search.finalists.study import create_or_join, passed_over
from hpsearch.search.finalists.table import Finalists, read_finalists, tabulate
from hpsearch.search.finalists.text import finalist_lines, finalist_table, opening_line
from hpsearch.search.publish.study import close_study
from hpsearch.search.run.beside import open_beside, train_beside
from hpsearch.search.run.drive import tell_failed
from hpsearch.search.services import Services
from hpsearch.search.steps import steps
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.summary import summarise
from hpsearch.search.worker.options import WorkerOptions
from hpsearch.storage.attributes import REASON, RUN_URL
from hpsearch.storage.mlflow.health import one_line
from hpsearch.storage.records.test_openings import read_opening


@dataclass(frozen=True)
class FinalistsRan:
    """What training the finalists came to: their table, whether a signal ended it, and why workers gave up."""

    table: Finalists
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
) -> FinalistsRan:
    """Choose, or go on with, the finalists of a study, train what is left of them, print the table and return it.

    Args:
        services: where the study is kept.
        study: the study, whose search is over.
        options: of the workers.
        top, seeds, new_set, infeasible: for :func:`hpsearch.search.finalists.study.create_or_join`.
        workers: how many; none to choose and show only.
        console: told what happens.

    Raises:
        SearchError: there are no finalists to choose, or the set was stopped.
        ObjectiveError: the objective cannot be loaded.
        StorageError: a service cannot be used.
    """
    with steps(console) as tell:
        tell("choosing the finalists")
        beside = open_beside(
            services,
            study,
            options,
            lambda: create_or_join(study, top=top, seeds=seeds, new_set=new_set, infeasible=infeasible),
        )
    chosen, created = beside.study, beside.created
    _print_begin(console, study, chosen, created=created)
    if (counting := read_finalists(study)) is not None and counting.study != chosen.spec.name:
        stays = f"trial {counting.winner}" if counting.winner is not None else f"trials {counting.front}"
        console.print(f"until these have a winner, that of {counting.study} stays: {stays}", style="yellow")
    interrupted, fleet = train_beside(console, beside, options, workers if tabulate(study, chosen).pending else 0)
    found = tabulate(study, chosen)
    if not found.pending:
        _tell(console, beside.services, study)
    _print_end(console, study, found)
    for trial in [t for t in chosen.trials(TrialState.FAIL) if REASON in t.user_attrs][-1:]:
        console.print(f"the last failure, of trial {trial.number} of {chosen.spec.name}: {trial.user_attrs[REASON]}")
    gave_up = tell_failed(console, fleet)
    if found.pending:
        console.print(f"go on with: {chosen.go_on}; or join with: {command('worker', '--study', chosen.spec.name)}")
    return FinalistsRan(found, interrupted, gave_up)


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


def _print_end(console: Console, study: StoredStudy, found: Finalists) -> None:
    console.print()
    console.print(finalist_table(study, found))
    for line in finalist_lines(study, found):
        console.print(line)
    if url := study.attrs.get(RUN_URL):
        console.print(f"MLflow, study: {url}")


def _tell(console: Console, services: Services, study: StoredStudy) -> None:
    try:
        close_study(study, summarise(study), services.open_tracking())
    except Exception as error:  # the values are in the database: a server that is away must not hide them
        again = command("finalists", study.spec.name)
        console.print(
            f"MLflow was not told of the finalists ({one_line(error)}); tell it with: {again}", style="yellow"
        )
