"""``hpsearch report``: the study as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpsearch.search.cli import options as o


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command()(report)


def report(
    name: o.StudyName,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write  [default: reports/STUDY.html in the home]"),
    ] = None,
    storage_url: o.StorageUrl = None,
    tracking_uri: o.TrackingUri = None,
    home: o.Home = None,
) -> None:
    """Write a study's report as a self-contained HTML page and log it to the study's run in MLflow."""
    from hpsearch.search.api import actions
    from hpsearch.search.api.study import Study

    study = Study.open(name, storage_url=storage_url, tracking_uri=tracking_uri, home=home)
    path = actions.write(study.services, study.stored, output)
    typer.echo(str(path))
    actions.log(study.services, study.stored, path)
