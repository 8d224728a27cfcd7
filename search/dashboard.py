"""The dashboard service: Optuna's pages with artifacts from MLflow. It also records promotions made in MLflow's UI."""

from __future__ import annotations

import functools
import logging
import os

from hpsearch.search.console import log_to_stderr
from hpsearch.search.promotion.registry_watch import RegistryWatcher
from hpsearch.search.services import MLFLOW_UI_URL
from hpsearch.storage.dashboard import serve_dashboard
from hpsearch.storage.database.connect import check_database
from hpsearch.storage.mlflow.artifacts import MlflowArtifactStore
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.mlflow.credentials import allow_credentials
from hpsearch.storage.mlflow.health import check_server
from hpsearch.storage.study_storage.storage import open_storage


def serve(
    storage_url: str, tracking_uri: str | None, *, host: str, port: int, read_only: bool = False, token: str | None
) -> None:
    """Serve the dashboard until the process ends. The tracking server may be unavailable.

    Args:
        storage_url: Postgres database with the studies.
        tracking_uri: MLflow server; if None, the dashboard serves no artifacts and records no promotions.
        host: address to listen on.
        port: port to listen on.
        read_only: whether the pages reject changes by users; promotions are recorded even then.
        token: token that requests must have; None to accept requests without a token.

    Raises:
        StorageError: the database is unusable, or the address is in use.
    """
    if tracking_uri is None:
        return serve_dashboard(storage_url, host=host, port=port, read_only=read_only, token=token)
    log_to_stderr(logging.WARNING)
    check_database(storage_url)
    allow_credentials(tracking_uri)

    @functools.cache
    def tracking() -> Tracking:
        check_server(tracking_uri)
        return Tracking(tracking_uri, ui_url=os.environ.get(MLFLOW_UI_URL))

    # Polls every few seconds, so it needs one connection and may give up early.
    storage = open_storage(storage_url, application_name="hpsearch-registry-watch", pool_size=1, retry_seconds=10.0)
    with RegistryWatcher(storage, tracking):
        artifacts = MlflowArtifactStore(lambda: tracking().client)
        serve_dashboard(storage_url, host=host, port=port, artifacts=artifacts, read_only=read_only, token=token)
    return None
