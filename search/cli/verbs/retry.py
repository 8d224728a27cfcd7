"""``hpsearch retry``: a failed trial is run again, under its number."""

from __future__ import annotations

from typing import Annotated

import typer

from hpsearch.search.cli import options as o


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command()(retry)


def retry(
    name: o.StudyName,
    trial: Annotated[list[int], typer.Option("--trial", min=0, help="Number of the trial; may be given again.")],
    *,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Run it from its first epoch, not from its last checkpoint.")
    ] = False,
    storage_url: o.StorageUrl = None,
    tracking_uri: o.TrackingUri = None,
    home: o.Home = None,
) -> None:
    """Run a failed or infeasible trial again: same number, same parameters, same MLflow run, retries counted anew."""
    from hpsearch.search.api.study import Study

    study = Study.open(name, storage_url=storage_url, tracking_uri=tracking_uri, home=home)
    for number in dict.fromkeys(trial):
        epoch = study.retry(number, from_start=from_start)
        where = "from its beginning" if epoch is None else f"after epoch {epoch + 1}, its last checkpoint's"
        if epoch == -1:
            where = "in its first epoch, at its last checkpoint's step"
        typer.echo(f"trial {number} waits to be run again, {where}")
    typer.echo(f"workers that run take it up; else: {study.stored.go_on}")
