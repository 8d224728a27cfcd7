"""``hpsearch sync``: what waits on this machine for MLflow is sent."""

from __future__ import annotations

from typing import Annotated

import typer

from search.cli import options as o


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command()(sync)


def sync(
    study: Annotated[
        str | None, typer.Argument(metavar="[STUDY]", help="The study's name  [default: all that have something]")
    ] = None,
    storage_url: o.StorageUrl = None,
    tracking_uri: o.TrackingUri = None,
    checkpoint_url: o.CheckpointUrl = None,
    home: o.Home = None,
) -> int:
    """Send MLflow what was logged while it was away, and models that a lost machine still had; safe to repeat."""
    from search.api.study import Study

    studies = Study.waiting(
        study, storage_url=storage_url, tracking_uri=tracking_uri, checkpoint_url=checkpoint_url, home=home
    )
    if not studies:
        typer.echo("nothing waits for MLflow on this machine")
    synced = [each.sync() for each in studies]
    return 0 if all(each.whole for each in synced) else 1
