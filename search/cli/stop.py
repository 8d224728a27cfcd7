"""``hpsearch stop``: every worker of a study, wherever it runs, ends its epoch, saves, and goes."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from search.cli import options as o


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command()(stop)


def stop(
    name: o.StudyName,
    wait: Annotated[bool, typer.Option("--wait", help="Return when no trial is running any more.")] = False,
    storage_url: o.StorageUrl = None,
    home: o.Home = None,
) -> None:
    """Stop a study from anywhere: its workers end their epoch, save, give their trials back and leave."""
    from search.cli.open_study import open_for_reading
    from search.console import command
    from search.study.steering import running_trials, stop_study
    from search.study.study import load_study

    _, storage = open_for_reading(storage_url, None, home)
    study = load_study(storage, name)
    before = stop_study(study)
    running = running_trials(study)
    typer.echo(f"{name} was stopped already, {before}" if before else f"stopped {name}")
    if running:
        typer.echo(f"running trials: {running}; each is given back after the epoch it is in")
    while wait and running_trials(study):
        time.sleep(0.5)
    typer.echo(f"go on with: {command('start', name)}")
