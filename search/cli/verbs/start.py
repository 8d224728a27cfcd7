"""``hpsearch start``: a stopped study goes on."""

from __future__ import annotations

import typer

from hpsearch.search.cli import options as o


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command()(start)


def start(name: o.StudyName, storage_url: o.StorageUrl = None, home: o.Home = None) -> None:
    """Let a study go on that was stopped, or stopped early by itself; start workers with 'run' or 'worker'."""
    from hpsearch.search.api.study import Study
    from hpsearch.search.console import command

    study = Study.open(name, storage_url=storage_url, home=home)
    why = study.start()
    typer.echo(f"started {name}, which was stopped {why}" if why else f"{name} was not stopped")
    typer.echo(f"run it with: {study.stored.go_on}")
    typer.echo(f"or join it:  {command('worker', '--study', name)}")
