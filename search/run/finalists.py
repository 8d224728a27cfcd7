"""Training the finalists of a study with a fleet on this machine, as `run` does a search."""

from __future__ import annotations

import optuna
from rich.console import Console

from objectives import load_objective
from search.console import PlainConsole, command
from search.entry import EXIT_INTERRUPTED
from search.errors import SearchError
from search.finalists.study import create_or_join, passed_over
from search.finalists.table import Finalists, read_finalists, tabulate
from search.finalists.text import finalist_lines, finalist_table, opening_line
from search.fleet.fleet import Fleet
from search.publish.study import close_study
from search.run.drive import drive, open_run, tell_failed, tell_outbox
from search.services import Services, find_services
from search.steps import steps
from search.study.checkpoints import note_checkpoints
from search.study.study import StoredStudy, load_study
from search.study.summary import summarise
from search.worker.join import WorkerOptions
from storage.attributes import RUN_URL, STOPPED, TRACKING_URI
from storage.checkpoints.store import Checkpoints
from storage.mlflow.health import one_line
from storage.records.test_openings import read_opening
from storage.study_storage.opening import engine_of, open_storage


def run_finalists(
    name: str,
    options: WorkerOptions,
    *,
    top: int | None,
    seeds: int | None,
    new_set: bool,
    workers: int,
) -> int:
    """Choose, or go on with, the finalists of `name`, train what is left of them, print the table; return the code.

    Returns:
        0 when all have ended and one wins, or when no worker was asked for; 130 after Ctrl-C; else 1.
    """
    console = PlainConsole()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if options.checkpoint_url is not None:
        Checkpoints(options.checkpoint_url).check()
    with steps(console) as tell:
        services = find_services(options.storage_url, options.tracking_uri, home=options.home, both=True, progress=tell)
        tell("choosing the finalists")
        study = load_study(open_storage(services.storage_url, application_name="hpsearch finalists"), name)
        if (of := study.spec.finalists_of) is not None:
            raise SearchError(f"study {name!r} holds the finalists of {of.study!r}: {command('finalists', of.study)}")
        chosen, created = create_or_join(study, top=top, seeds=seeds, new_set=new_set)
        chosen.set_attr(TRACKING_URI, services.open_tracking().uri)
        away = open_run(services, chosen, required=False)
        if options.checkpoint_url is not None:
            note_checkpoints(chosen, options.checkpoint_url)
    _print_begin(console, study, chosen, created=created)
    if (counting := read_finalists(study)) is not None and counting.study != chosen.spec.name:
        console.print(
            f"until these have a winner, that of {counting.study} stays: trial {counting.winner}", style="yellow"
        )
    if away:
        console.print(f"{away}; what is logged waits in {services.home / 'outbox'}", style="yellow")
    found = tabulate(study, chosen)
    interrupted, fleet = False, None
    if found.pending and workers:
        if why := chosen.attrs.get(STOPPED):
            again = command("start", chosen.spec.name)
            raise SearchError(f"study {chosen.spec.name!r} was stopped {why}: start it with {again}")
        objective = load_objective(chosen.spec.objective)
        if warning := chosen.source_warning(objective):
            console.print(f"warning: {warning}", style="yellow")
        interrupted, fleet = drive(console, services, chosen, workers, options)
    return _finish(console, services, study, chosen, interrupted=interrupted, fleet=fleet, asked=bool(workers))


def _print_begin(console: Console, name: StoredStudy, chosen: StoredStudy, *, created: bool) -> None:
    of = chosen.spec.finalists_of
    assert of is not None
    trials, seeds = ", ".join(map(str, of.trials)), ", ".join(map(str, of.seeds))
    console.print(f"finalists of {name.spec.name}{' (new)' if created else ''}: trials {trials} on the seeds {seeds}")
    opening = read_opening(engine_of(name.storage), name.study_id)
    if created and opening is not None:
        console.print(f"{opening_line(name, opening)}: another winner could not be tested any more", style="yellow")
    if len(of.trials) < of.top:
        console.print(f"fewer than --top {of.top}: there are no more that are complete, differ and have their models")
    if created and (gone := passed_over(name, of.top)):
        console.print(
            f"passed over: trial{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))}, for hpsearch gc removed "
            "what could be tested and promoted",
            style="yellow",
        )


def _finish(
    console: Console,
    services: Services,
    name: StoredStudy,
    chosen: StoredStudy,
    *,
    interrupted: bool,
    fleet: Fleet | None,
    asked: bool,
) -> int:
    """Print the table, tell MLflow and the dashboard, and return the exit code."""
    tell_outbox(console, services, chosen, interrupted=interrupted)
    found = tabulate(name, chosen)
    if not found.pending:
        _tell(console, services, name)
    console.print()
    console.print(finalist_table(name, found))
    for line in finalist_lines(name, found):
        console.print(line)
    if url := name.attrs.get(RUN_URL):
        console.print(f"MLflow, study: {url}")
    tell_failed(console, fleet)
    if found.pending:
        console.print(f"go on with: {chosen.go_on}; or join with: {command('worker', '--study', chosen.spec.name)}")
    return _code(found, interrupted=interrupted, asked=asked)


def _code(found: Finalists, *, interrupted: bool, asked: bool) -> int:
    if interrupted:
        return EXIT_INTERRUPTED
    if found.pending and not asked:
        return 0
    return 0 if found.winner is not None else 1


def _tell(console: Console, services: Services, name: StoredStudy) -> None:
    try:
        close_study(name, summarise(name), services.open_tracking())
    except Exception as error:  # the values are in the database: a server that is away must not hide them
        again = command("finalists", name.spec.name)
        console.print(
            f"MLflow was not told of the finalists ({one_line(error)}); tell it with: {again}", style="yellow"
        )
