"""What verbs tell MLflow about what they did in the study's database, which alone decides."""

from __future__ import annotations

from collections.abc import Callable

import typer

from search.services import Services
from search.study.study import StoredStudy
from storage.attributes import RUN_ID, TRACKING_URI
from storage.mlflow.client import Tracking
from storage.mlflow.health import check_server, one_line


def tell_mlflow(services: Services, study: StoredStudy, tell: Callable[[Tracking], object]) -> None:
    """Tell the study's tracking server; one that does not answer costs a warning, for the study goes on without it."""
    attrs = study.attrs
    uri = services.tracking_uri or attrs.get(TRACKING_URI)
    if uri is None or RUN_ID not in attrs:
        return  # nobody has opened a run of the study yet
    try:
        check_server(uri)
        tell(services.open_tracking(uri))
    except Exception as error:  # the study is changed already: a server that is away must not hide it
        typer.echo(f"warning: MLflow was not told ({one_line(error)}); it is when the trials run", err=True)
