"""Commands that change a study: stop, start, extend, retry, sync, trust, delete, gc."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpsearch.search.cli import options as o
from hpsearch.search.cli.app import MONITOR_SECTION, confirm, echo, echo_report, register
from hpsearch.short_lists import join_first

if TYPE_CHECKING:
    from rich.table import Table

    from hpsearch.search.study.cleanup import Garbage


@register(MONITOR_SECTION)
def stop(
    name: o.StudyName,
    *,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until no trial of the study is running")] = False,
    where: o.Addresses,
) -> None:
    """Stop a study on all machines.

    The workers finish their epoch, save a checkpoint, release their trials and exit.
    """
    from hpsearch.search.api.study import Study
    from hpsearch.search.console import format_command
    from hpsearch.search.study.control import count_running

    study = Study.open(name, **where)
    before, running = study.stop(), count_running(study._stored)
    echo(f"study {name} was already stopped {before}" if before else f"stopped study {name}")
    if running:
        echo(f"running trials: {running}; each stops after its current epoch and can be resumed")
    if wait:
        study.stop(wait=True)
    echo(f"resume the study with: {format_command('start', name)}")


@register(MONITOR_SECTION)
def start(name: o.StudyName, where: o.Addresses) -> None:
    """Resume a stopped study. Afterwards, start its workers with 'run' or 'worker'."""
    from hpsearch.search.api.study import Study
    from hpsearch.search.console import format_command

    study = Study.open(name, **where)
    why = study.start()
    echo(f"started study {name} again; it was stopped {why}" if why else f"study {name} was not stopped")
    echo(f"start workers with: {study._stored.resume_command}")
    echo(f"or start one worker with: {format_command('worker', '--study', name)}")


def _budget_option(flag: str, unit: str) -> Any:
    return typer.Option(flag, metavar="N", help=f"New budget in {unit} as N, or an increase of the budget as +N")


@register(MONITOR_SECTION)
def extend(
    name: o.StudyName,
    trials: Annotated[str | None, _budget_option("--trials", "trials")] = None,
    budget_epochs: Annotated[str | None, _budget_option("--budget-epochs", "epochs")] = None,
    budget_seconds: Annotated[str | None, _budget_option("--budget-seconds", "seconds of training")] = None,
    *,
    enqueue: o.Enqueue = None,
    where: o.Addresses,
) -> None:
    """Change a study's budget, also while it runs. A finished study is reopened."""
    from hpsearch.search.api.study import Study
    from hpsearch.search.console import pluralize
    from hpsearch.search.spec.spec import MAX_TRIALS

    study = Study.open(name, **where)
    early_stop = study._stored.early_stop
    budgets = {"n_trials": trials, "budget_epochs": budget_epochs, "budget_seconds": budget_seconds}
    done = study._extend(budgets, enqueue)
    if enqueue is not None:
        echo(f"study {name}: enqueued {pluralize(done.enqueued_trials, 'new configuration')} from {enqueue}")
    if early_stop is not None:
        echo(f"study {name} continues; it was terminated early ({early_stop.reason}), which may happen again")
    started = f"{pluralize(done.started_trials, 'trial')} started so far"
    if done.old_budget == done.new_budget:
        echo(f"study {name} already has a budget of {done.new_budget:.12g} {done.unit}; {started}")
        return
    is_unlimited = done.unit == "trials" and done.old_budget == MAX_TRIALS
    before = "unlimited" if is_unlimited else f"{done.old_budget:.12g}"
    echo(f"study {name}: budget changed from {before} to {done.new_budget:.12g} {done.unit}; {started}")
    echo(f"running workers use the new budget; start more workers with: {study._stored.resume_command}")
    echo_report(study)


@register(MONITOR_SECTION)
def retry(
    name: o.StudyName,
    trial: Annotated[list[int], o.trial_option("the trial; repeatable")],
    *,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Train from scratch instead of from the last checkpoint")
    ] = False,
    where: o.Addresses,
) -> None:
    """Run failed or infeasible trials again.

    A trial keeps its number, parameters and MLflow run. Its number of used retries is reset to zero.
    """
    from hpsearch.search.api.study import Study

    study = Study.open(name, **where)
    for number in dict.fromkeys(trial):
        epoch = study.retry(number, from_start=from_start)
        begin = "from scratch" if epoch is None else f"from its checkpoint after epoch {epoch + 1}"
        if epoch == -1:
            begin = "from its checkpoint within the first epoch"
        echo(f"trial {number} will run again {begin}")
    echo(f"running workers run waiting trials next; start more workers with: {study._stored.resume_command}")


@register(MONITOR_SECTION)
def sync(
    study: Annotated[
        str | None,
        typer.Argument(
            metavar="STUDY",
            help="Name of the study  [default: all studies with unsent records]",
            autocompletion=o.complete_study,
        ),
    ] = None,
    *,
    where: o.Addresses,
) -> int:
    """Send unsent records and models of this machine to MLflow.

    The other trackers receive their records too. If a machine is lost, 'sync STUDY' rebuilds the models of its trials
    from their checkpoints. A repeated call has no further effect.
    """
    from hpsearch.search.api.study import Study

    studies = Study._unsent(study, **where)
    if not studies:
        echo("this machine has no unsent records of any study")
    synced = [each.sync() for each in studies]
    return 0 if all(each.is_complete for each in synced) else 1


@register(MONITOR_SECTION)
def trust(name: o.StudyName, *, yes: o.Yes = False, where: o.Addresses) -> None:
    """Confirm the code of a study.

    This is necessary on a machine where you did not start the study, if the code of the objective has changed, can be
    changed by another user, or comes from a backup. `run` confirms the objective that it is given. In a restored study,
    'trust' also allows its sampler from OptunaHub, --tensorboard, --wandb and --checkpoint-url, and the files in
    its checkpoints.
    """
    from hpsearch.objectives.references import BUILTIN
    from hpsearch.search.api.opening import open_study
    from hpsearch.search.errors import SearchError
    from hpsearch.search.study.trust import read_code
    from hpsearch.storage.display import escape_line

    study, _ = open_study(name, where)
    reference = study.spec.objective
    if reference in BUILTIN and not study.external_settings:
        echo(f"the objective {reference} is built in and needs no confirmation")
        return
    if (code := read_code(reference)) is None:
        raise SearchError(f"the objective {reference} of study {name!r} is not on this machine; copy it to this place")
    checkpoints = study.restored_checkpoints
    named = " and ".join([str(code.file), *study.external_settings, *checkpoints])
    if not yes and not confirm(f"may hpsearch use {escape_line(named)} with your rights?"):
        echo("not confirmed: the code stays untrusted")
        raise typer.Exit(1)
    study.trust_code(code, with_checkpoints=bool(checkpoints))
    echo(f"commands on this machine may use {named}")


@register(MONITOR_SECTION)
def delete(name: o.StudyName, *, yes: o.Yes = False, where: o.Addresses) -> None:
    """Delete a study and its files. Its MLflow runs are kept.

    Deletes the trials, finalists, refits, checkpoints, and the study's files on this machine.
    """
    from hpsearch.search.api.opening import open_services
    from hpsearch.search.api.study import Study
    from hpsearch.search.study.cleanup import delete_damaged_study, delete_study, describe_deletion
    from hpsearch.storage.errors import DamagedStudyError

    study = None
    with suppress(DamagedStudyError):
        study = Study.open(name, **where)
    described = (
        f"the database rows of study {name}, whose settings are damaged"
        if study is None
        else describe_deletion(study._stored)
    )
    if not yes and not confirm(f"delete {described}?"):
        echo("cancelled: nothing was deleted")
        raise typer.Exit(1)
    if study is None:
        services, storage = open_services(where)
        delete_damaged_study(storage, name)
        kept = f"MLflow runs, finalist and refit studies, and folders named {name}-... in {services.home}"
        echo(f"deleted study {name}; its {kept} are kept")
        return
    for deleted in delete_study(study._services, study._stored):
        echo(f"deleted study {deleted}; its MLflow runs are kept")


@register(MONITOR_SECTION)
def gc(
    name: Annotated[
        str | None,
        typer.Argument(metavar="STUDY", help="Name of the study  [default: all]", autocompletion=o.complete_study),
    ] = None,
    *,
    keep_top: Annotated[
        int, typer.Option("--keep-top", min=1, metavar="K", help="Number of best trials that keep their models")
    ] = 5,
    yes: o.Yes = False,
    where: o.Addresses,
) -> None:
    """Delete surplus models, old checkpoints and run folders.

    Lists the files, and asks for confirmation. Surplus models are those of trials outside the best --keep-top. The
    files of running and waiting trials, finalists and registered model versions are kept. Workers may run meanwhile.
    Exit code 1 if some files could not be removed.
    """
    from rich.filesize import decimal

    from hpsearch.search.api.studies import list_studies
    from hpsearch.search.api.study import Study
    from hpsearch.search.console import PlainConsole
    from hpsearch.search.errors import SearchError
    from hpsearch.search.study.cleanup import remove_garbage
    from hpsearch.storage.errors import DamagedStudyError

    found: list[Garbage] = []
    problems: list[str] = []
    names = [row.name for row in list_studies(**where) if row.is_from_hpsearch] if name is None else [name]
    for each in names:
        try:
            garbage, skipped = Study.open(each, **where)._garbage(keep_top)
        except (SearchError, DamagedStudyError) as error:
            if name is not None:
                raise
            garbage, skipped = [], [f"{each}: {error}"]
        found, problems = found + garbage, problems + skipped
    console = PlainConsole()
    if found:
        console.print(_make_table(found))
    else:
        console.print("no files to remove")
    for problem in problems:
        echo(f"hpsearch: could not search all files of study {problem}", err=True)
    if not found or not (yes or confirm(f"remove these files ({decimal(sum(g.size for g in found))})?")):
        return
    freed, failures = remove_garbage(found)
    for problem in failures:
        echo(f"hpsearch: study {problem}", err=True)
    console.print(f"freed {decimal(freed)}")
    if any(item.location == "MLflow" for item in found):
        console.print("MLflow keeps a small record of each removed model until 'mlflow gc' is run on the MLflow server")
    if failures:
        raise typer.Exit(1)


def _make_table(found: list[Garbage]) -> Table:
    from rich.filesize import decimal

    from hpsearch.search.console import plain_table

    table = plain_table("study", "files", "trials", "where", "size", right=("size",))
    for item in found:
        table.add_row(item.study, item.kind, join_first(item.trials, 8), item.location, decimal(item.size))
    return table
