"""``hpsearch extend``: a larger budget for a study, running or not."""

from __future__ import annotations

from typing import Annotated

import typer

from hpsearch.search.cli import options as o


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command()(extend)


def extend(
    name: o.StudyName,
    trials: Annotated[
        str | None, typer.Option("--trials", metavar="N", help="+N for N more trials, or the new budget as a number.")
    ] = None,
    budget_epochs: Annotated[
        str | None, typer.Option("--budget-epochs", metavar="N", help="The same of a budget in epochs.")
    ] = None,
    budget_seconds: Annotated[
        str | None, typer.Option("--budget-seconds", metavar="N", help="The same of a budget in seconds of training.")
    ] = None,
    *,
    enqueue: o.Enqueue = None,
    storage_url: o.StorageUrl = None,
    tracking_uri: o.TrackingUri = None,
    home: o.Home = None,
) -> None:
    """Change a study's budget: workers that run take it up with their next trial, a finished study is reopened."""
    from hpsearch.search.api.study import Study

    study = Study.open(name, storage_url=storage_url, tracking_uri=tracking_uri, home=home)
    given_up = study.stored.given_up
    done = study.extend(trials, budget_epochs=budget_epochs, budget_seconds=budget_seconds, enqueue=enqueue)
    if enqueue is not None:
        typer.echo(f"{name}: {done.enqueued} of the configurations of {enqueue} enqueued")
    if given_up is not None:
        typer.echo(f"{name} goes on, though {given_up.why}: that is judged again after some more trials")
    of = "of them" if done.unit == "trials" else "trials"
    if done.before == done.after:
        typer.echo(f"{name} has a budget of {done.after:.12g} {done.unit} already, {done.started} {of} are started")
        return
    typer.echo(f"{name}: {done.before:.12g} -> {done.after:.12g} {done.unit}, {done.started} {of} are started")
    typer.echo(f"workers that run take it up; else: {study.stored.go_on}")
