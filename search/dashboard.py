"""The dashboard service: Optuna's pages with what the trials left in MLflow, and the noticing of promotions."""

from __future__ import annotations

import functools
import logging
import os
import sys

from hpsearch.search.promotion.registry_watch import Watch
from hpsearch.search.services import MLFLOW_UI_URL
from hpsearch.storage.dashboard import serve_dashboard
from hpsearch.storage.database.connect import check_database
from hpsearch.storage.mlflow.artifacts import RunArtifacts
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.mlflow.health import check_server
from hpsearch.storage.study_storage.storage import open_storage


def serve(storage_url: str, tracking_uri: str | None, *, host: str, port: int, read_only: bool = False) -> None:
    """Serve the dashboard until the process is ended; the tracking server may come later, or be away.

    Args:
        storage_url: Postgres of the studies.
        tracking_uri: MLflow server, or None: then there are no artifacts, and nothing is noticed.
        host: address to listen on.
        port: port to listen on.
        read_only: whether its pages may change nothing; promotions are noticed all the same.

    Raises:
        StorageError: the database cannot be used, or the address cannot be listened on.
    """
    if tracking_uri is None:
        return serve_dashboard(storage_url, host=host, port=port, read_only=read_only)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    check_database(storage_url)

    @functools.cache
    def tracking() -> Tracking:
        check_server(tracking_uri)
        return Tracking(tracking_uri, ui_url=os.environ.get(MLFLOW_UI_URL))

    # Its own connection, and little patience: it is a look every few seconds.
    storage = open_storage(storage_url, application_name="hpsearch-noticing", pool_size=1, patience=10.0)
    with Watch(storage, tracking):
        artifacts = RunArtifacts(lambda: tracking().client)
        serve_dashboard(storage_url, host=host, port=port, artifacts=artifacts, read_only=read_only)
    return None
