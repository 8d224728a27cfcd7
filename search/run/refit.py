"""Training the refit of a study's winner with a fleet on this machine, as `finalists` does finalists."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console

from hpsearch.objectives.loading import load_objective
from hpsearch.objectives.own_loop.loop_objective import LoopObjective
from hpsearch.search.console import command, counted
from hpsearch.search.errors import SearchError
from hpsearch.search.finalists.refit import Refit, create_or_join_refit, refit_lines, tabulate_refit
from hpsearch.search.run.beside import open_beside, train_beside
from hpsearch.search.run.drive import tell_failed
from hpsearch.search.services import Services
from hpsearch.search.steps import steps
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.worker.options import WorkerOptions


@dataclass(frozen=True)
class RefitRan:
    """What training a refit came to: its runs, whether a signal ended it, and why workers gave up."""

    refit: Refit
    interrupted: bool = False
    gave_up: tuple[str, ...] = ()


def run_refit(
    services: Services,
    study: StoredStudy,
    options: WorkerOptions,
    *,
    trial: int | None,
    seeds: int | None,
    workers: int,
    console: Console,
) -> RefitRan:
    """Make, or go on with, the refit of a study's winner, train what is left of it, and return what it came to.

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
    interrupted, fleet = train_beside(console, beside, options, workers if found.pending else 0)
    found = tabulate_refit(made)
    for line in refit_lines(made, found):
        console.print(line)
    gave_up = tell_failed(console, fleet)
    if found.pending:
        console.print(f"go on with: {made.go_on}; or join with: {command('worker', '--study', made.spec.name)}")
    return RefitRan(found, interrupted, gave_up)
