"""``hpsearch delete``: a study with its trials and checkpoints."""

from __future__ import annotations

from typing import Annotated

import typer

from hpsearch.search.cli import options as o
from hpsearch.search.cli.confirm import confirm


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command()(delete)


def delete(
    name: o.StudyName,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    storage_url: o.StorageUrl = None,
    checkpoint_url: o.CheckpointUrl = None,
    home: o.Home = None,
) -> None:
    """Delete a study with its trials, finalists, checkpoints and files on this machine; what is in MLflow stays."""
    from hpsearch.search.api.actions import what_goes
    from hpsearch.search.api.study import Study

    study = Study.open(name, storage_url=storage_url, checkpoint_url=checkpoint_url, home=home)
    if not yes and not confirm(f"delete {what_goes(study.stored)}?"):
        raise typer.Abort
    for gone in study.delete():
        typer.echo(f"deleted {gone}; its runs in MLflow stay")
