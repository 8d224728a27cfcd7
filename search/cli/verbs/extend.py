"""``hpsearch extend``: more trials for a study, running or not."""

from __future__ import annotations

from typing import Annotated

import typer

from search.cli import options as o


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command()(extend)


def extend(
    name: o.StudyName,
    trials: Annotated[
        str, typer.Option("--trials", metavar="N", help="+N for N more trials, or the new budget as a number.")
    ],
    enqueue: o.Enqueue = None,
    storage_url: o.StorageUrl = None,
    tracking_uri: o.TrackingUri = None,
    home: o.Home = None,
) -> None:
    """Change a study's budget: workers that run take it up with their next trial, a finished study is reopened."""
    from search.api.study import Study

    study = Study.open(name, storage_url=storage_url, tracking_uri=tracking_uri, home=home)
    done = study.extend(trials, enqueue=enqueue)
    if enqueue is not None:
        typer.echo(f"{name}: {done.enqueued} of the configurations of {enqueue} enqueued")
    if done.before == done.after:
        typer.echo(f"{name} has a budget of {done.after} trials already, {done.started} of them are started")
        return
    typer.echo(f"{name}: {done.before} -> {done.after} trials, {done.started} of them are started")
    typer.echo(f"workers that run take it up; else: {study.stored.go_on}")
