"""``hpsearch stop``: every worker of a study, wherever it runs, ends its epoch, saves, and goes."""

from __future__ import annotations

from typing import Annotated

import typer

from hpsearch.search.cli import options as o


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
    from hpsearch.search.api.study import Study
    from hpsearch.search.console import command

    study = Study.open(name, storage_url=storage_url, home=home)
    before, running = study.stop(), study.running
    typer.echo(f"{name} was stopped already, {before}" if before else f"stopped {name}")
    if running:
        typer.echo(f"running trials: {running}; each is given back after the epoch it is in")
    if wait:
        study.stop(wait=True)
    typer.echo(f"go on with: {command('start', name)}")
