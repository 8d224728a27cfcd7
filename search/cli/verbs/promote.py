"""``hpsearch promote``: a trial's model gets the name that programs load it by."""

from __future__ import annotations

from typing import Annotated

import typer

from search.cli import options as o


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command()(promote)


def promote(
    name: o.StudyName,
    trial: Annotated[
        int | None,
        typer.Option("--trial", min=0, help="Number of the trial  [default: the finalists' winner, else the best]"),
    ] = None,
    alias: Annotated[
        str,
        typer.Option("--alias", help="Name for this version; the one that had it becomes 'previous' (previous-ALIAS)."),
    ] = "champion",
    model: Annotated[
        str | None, typer.Option("--model", help="Name of the registered model  [default: the study's]")
    ] = None,
    storage_url: o.StorageUrl = None,
    tracking_uri: o.TrackingUri = None,
    home: o.Home = None,
) -> None:
    """Register a trial's model in MLflow with its evidence, and let an alias name it."""
    from search.api.study import Study
    from search.console import command

    study = Study.open(name, storage_url=storage_url, tracking_uri=tracking_uri, home=home)
    done = study.promote(trial=trial, alias=alias, model=model)
    typer.echo(f"trial {done.trial} of {name} is models:/{done.model}@{done.alias} (version {done.version})")
    if done.made:
        typer.echo("it had left no model: this one was made now, from its best checkpoint")
    if done.replaced is not None:
        typer.echo(f"version {done.replaced}, which had the alias, is models:/{done.model}@{done.previous}")
    if done.unconfirmed:
        typer.echo(f"unconfirmed: {done.unconfirmed}")
    if done.checkable:
        typer.echo(f"check it: {command('serve-check', f'{done.model}@{done.alias}')}")
