"""``hpsearch sync``: what waits on this machine is sent."""

from __future__ import annotations

from typing import Annotated

import typer

from hpsearch.search.cli import options as o


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
    """Send MLflow and others what was logged while they were away, and models of lost machines; safe to repeat."""
    from hpsearch.search.api.study import Study

    studies = Study.waiting(
        study, storage_url=storage_url, tracking_uri=tracking_uri, checkpoint_url=checkpoint_url, home=home
    )
    if not studies:
        typer.echo("nothing waits on this machine")
    synced = [each.sync() for each in studies]
    return 0 if all(each.whole for each in synced) else 1
