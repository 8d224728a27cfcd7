"""``hpsearch report``: the study as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from search.cli import options as o


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
    from mlflow.exceptions import MlflowException

    from search.cli.open_study import notice_promotions, open_for_reading
    from search.errors import SearchError
    from search.publish.study import close_study
    from search.report import write_report
    from search.study.folders import report_path
    from search.study.study import load_study
    from search.study.summary import summarise
    from storage.attributes import RUN_ID, TRACKING_URI
    from storage.mlflow.client import RunDeletedError
    from storage.mlflow.health import check_server, one_line

    services, storage = open_for_reading(storage_url, tracking_uri, home)
    study = load_study(storage, name)
    if (of := study.spec.finalists_of) is not None:
        raise SearchError(f"study {name!r} holds finalists: they are in the report of {of.study!r}")
    notice_promotions(services, storage, study)
    path = output or report_path(services, study)
    try:
        write_report(study, path, dashboard_url=services.dashboard_url)
    except OSError as error:
        raise SearchError(f"--output {path}: cannot be written ({error.strerror}); choose another file") from None
    typer.echo(str(path))
    uri = services.tracking_uri or study.attrs.get(TRACKING_URI)
    if uri is not None:
        check_server(uri)
        tracking = services.open_tracking(uri)
        try:
            close_study(study, summarise(study), tracking)
            tracking.log_file(str(study.attrs[RUN_ID]), path)
        except (MlflowException, RunDeletedError) as error:
            raise SearchError(f"the report is written, but MLflow was not told ({one_line(error)})") from None
