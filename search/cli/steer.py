"""Change a study from outside: stop, start, extend, retry, send, delete, clean up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpsearch.search.cli import options as o
from hpsearch.search.cli.app import STEER, confirm, register

if TYPE_CHECKING:
    from rich.table import Table

    from hpsearch.search.study.cleanup import Garbage


@register(STEER)
def stop(
    name: o.StudyName,
    *,
    wait: Annotated[bool, typer.Option("--wait", help="Return when no trial is running")] = False,
    where: o.Addresses,
) -> None:
    """Stop a study on all machines.

    Its workers finish their epoch, save a checkpoint, release their trials and exit.
    """
    from hpsearch.search.api.study import Study
    from hpsearch.search.console import format_command
    from hpsearch.search.study.steering import count_running

    study = Study.open(name, **where)
    before, running = study.stop(), count_running(study._stored)
    typer.echo(f"{name} was stopped already, {before}" if before else f"stopped {name}")
    if running:
        typer.echo(f"running trials: {running}; each is given back after the epoch it is in")
    if wait:
        study.stop(wait=True)
    typer.echo(f"go on with: {format_command('start', name)}")


@register(STEER)
def start(name: o.StudyName, where: o.Addresses) -> None:
    """Resume a stopped study. Start its workers with 'run' or 'worker'."""
    from hpsearch.search.api.study import Study
    from hpsearch.search.console import format_command

    study = Study.open(name, **where)
    why = study.start()
    typer.echo(f"started {name}, which was stopped {why}" if why else f"{name} was not stopped")
    typer.echo(f"run it with: {study._stored.resume_command}")
    typer.echo(f"or join it:  {format_command('worker', '--study', name)}")


def _amount(flag: str, what: str) -> Any:
    return typer.Option(flag, metavar="N", help=f"Additional {what} as +N, or the new budget as N")


@register(STEER)
def extend(
    name: o.StudyName,
    trials: Annotated[str | None, _amount("--trials", "trials")] = None,
    budget_epochs: Annotated[str | None, _amount("--budget-epochs", "epochs")] = None,
    budget_seconds: Annotated[str | None, _amount("--budget-seconds", "seconds of training")] = None,
    *,
    enqueue: o.Enqueue = None,
    where: o.Addresses,
) -> None:
    """Change a study's budget, also while it runs. A finished study is reopened."""
    from hpsearch.search.api.study import Study

    study = Study.open(name, **where)
    given_up = study._stored.given_up
    budgets = {"n_trials": trials, "budget_epochs": budget_epochs, "budget_seconds": budget_seconds}
    done = study._extend(budgets, enqueue)
    if enqueue is not None:
        typer.echo(f"{name}: {done.enqueued} of the configurations of {enqueue} enqueued")
    if given_up is not None:
        typer.echo(f"{name} goes on, though {given_up.reason}: that is judged again after some more trials")
    of = "of them" if done.unit == "trials" else "trials"
    if done.before == done.after:
        typer.echo(f"{name} has a budget of {done.after:.12g} {done.unit} already, {done.started} {of} are started")
        return
    typer.echo(f"{name}: {done.before:.12g} -> {done.after:.12g} {done.unit}, {done.started} {of} are started")
    typer.echo(f"workers that run take it up; else: {study._stored.resume_command}")


@register(STEER)
def retry(
    name: o.StudyName,
    trial: Annotated[list[int], o.trial_number("the trial; repeatable")],
    *,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Start from the first epoch, not from the last checkpoint")
    ] = False,
    where: o.Addresses,
) -> None:
    """Run failed or infeasible trials again.

    A trial keeps its number, parameters and MLflow run; its retries are reset.
    """
    from hpsearch.search.api.study import Study

    study = Study.open(name, **where)
    for number in dict.fromkeys(trial):
        epoch = study.retry(number, from_start=from_start)
        begin = "from its beginning" if epoch is None else f"after epoch {epoch + 1}, its last checkpoint's"
        if epoch == -1:
            begin = "in its first epoch, at its last checkpoint's step"
        typer.echo(f"trial {number} waits to be run again, {begin}")
    typer.echo(f"workers that run take it up; else: {study._stored.resume_command}")


@register(STEER)
def sync(
    study: Annotated[
        str | None, typer.Argument(metavar="STUDY", help="Name of the study  [default: all with waiting data]")
    ] = None,
    *,
    where: o.Addresses,
) -> int:
    """Send logs and models that wait on this machine.

    MLflow and other trackers get them, also models of lost machines. Safe to repeat.
    """
    from hpsearch.search.api.study import Study

    studies = Study._unsent(study, **where)
    if not studies:
        typer.echo("nothing waits on this machine")
    synced = [each.sync() for each in studies]
    return 0 if all(each.is_complete for each in synced) else 1


@register(STEER)
def delete(
    name: o.StudyName,
    *,
    yes: o.Yes = False,
    where: o.Addresses,
) -> None:
    """Delete a study and its files; its runs in MLflow stay.

    Deletes trials, finalists, checkpoints and the files on this machine.
    """
    from hpsearch.search.api.actions import delete_study, describe_deletion
    from hpsearch.search.api.study import Study

    study = Study.open(name, **where)
    if not yes and not confirm(f"delete {describe_deletion(study._stored)}?"):
        raise typer.Abort
    for gone in delete_study(study._services, study._stored):
        typer.echo(f"deleted {gone}; its runs in MLflow stay")


@register(STEER)
def gc(
    name: Annotated[str | None, typer.Argument(metavar="STUDY", help="Study name  [default: all studies]")] = None,
    *,
    keep_top: Annotated[
        int, typer.Option("--keep-top", min=1, metavar="K", help="Number of best trials that keep their models")
    ] = 5,
    yes: o.Yes = False,
    where: o.Addresses,
) -> None:
    """Remove surplus models, old checkpoints and run directories.

    Lists them and asks first. Files of running and waiting trials, finalists and registered versions stay. Safe while a
    search runs.
    """
    from rich.filesize import decimal

    from hpsearch.search.api.study import Study, list_studies
    from hpsearch.search.console import PlainConsole
    from hpsearch.search.study.cleanup import remove_garbage

    found: list[Garbage] = []
    problems: list[str] = []
    names = [row.name for row in list_studies(**where) if row.ours] if name is None else [name]
    for each in names:
        some, told = Study.open(each, **where)._garbage(keep_top)
        found, problems = found + some, problems + told
    console = PlainConsole()
    if found:
        console.print(_table(found))
    else:
        console.print("nothing can go")
    for problem in problems:
        typer.echo(f"hpsearch: not looked at: {problem}", err=True)
    if not found or not (yes or confirm(f"remove these {decimal(sum(g.size for g in found))}?")):
        return
    freed, stay = remove_garbage(found)
    for problem in stay:
        typer.echo(f"hpsearch: {problem}", err=True)
    console.print(f"freed {decimal(freed)}")
    if any(garbage.where == "MLflow" for garbage in found):
        console.print("MLflow keeps a small record of each removed model until 'mlflow gc' is run on its server")


def _table(found: list[Garbage]) -> Table:
    from rich.filesize import decimal

    from hpsearch.search.console import plain_table

    table = plain_table("study", "what can go", "trials", "where", "size", right=("size",))
    for garbage in found:
        table.add_row(garbage.study, garbage.kind, _numbers(garbage.trials), garbage.where, decimal(garbage.size))
    return table


def _numbers(trials: tuple[int, ...], most: int = 8) -> str:
    """Return ``0, 3, 4 and 12 more``."""
    more = f" and {len(trials) - most} more" if len(trials) > most else ""
    return ", ".join(map(str, trials[:most])) + more
