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
    storage_url: o.StorageUrl = None,
    tracking_uri: o.TrackingUri = None,
    home: o.Home = None,
) -> None:
    """Change a study's budget: workers that run take it up with their next trial, a finished study is reopened."""
    from search.cli.mlflow import tell_mlflow
    from search.cli.open_study import open_for_reading
    from search.publish.study import reopen_study
    from search.study.steering import extend_study
    from search.study.study import load_study

    services, storage = open_for_reading(storage_url, tracking_uri, home)
    study = load_study(storage, name)
    done = extend_study(study, trials)
    if done.before == done.after:
        typer.echo(f"{name} has a budget of {done.after} trials already, {done.started} of them are started")
        return
    typer.echo(f"{name}: {done.before} -> {done.after} trials, {done.started} of them are started")
    tell_mlflow(services, study, lambda tracking: reopen_study(load_study(storage, name), tracking))
    typer.echo(f"workers that run take it up; else: {study.go_on}")
