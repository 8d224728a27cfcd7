"""Which services a command uses: the given URLs, or the embedded stack."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from search.errors import SearchError
from storage import stack
from storage.connect import check_database
from storage.errors import StorageError
from storage.home import home_dir
from storage.tracking import Tracking, check_server
from storage.urls import normalise

# Where browsers reach the UIs, when that is not where the workers do (in containers, behind a proxy): for links.
DASHBOARD_URL = "HPSEARCH_DASHBOARD_URL"
MLFLOW_UI_URL = "HPSEARCH_MLFLOW_UI_URL"


@dataclass(frozen=True)
class Services:
    """Where a search is kept. Without a dashboard of ours its URL is None; a worker may learn the tracking later."""

    home: Path
    storage_url: str
    tracking_uri: str | None
    dashboard_url: str | None
    embedded: bool = False

    def open_tracking(self, uri: str | None = None) -> Tracking:
        """Return the tracking server, by default the one that was given."""
        address = uri or self.tracking_uri
        assert address is not None
        return Tracking(address, ui_url=os.environ.get(MLFLOW_UI_URL))


def find_services(
    storage_url: str | None,
    tracking_uri: str | None,
    *,
    home: str | None = None,
    tracking_required: bool = False,
    patience: float = 0.0,
    progress: Callable[[str], None] = lambda _: None,
) -> Services:
    """Return the given services, checked, or the embedded stack's, started if need be.

    Args:
        storage_url: Postgres of the studies, or None.
        tracking_uri: MLflow server, or None.
        home: folder of the embedded stack, checkpoints and logs; by default the user's.
        tracking_required: whether a given database without a tracking server will not do.
        patience: seconds to wait for a tracking server that is away.
        progress: is told what is being done.

    Raises:
        SearchError: only one of the two URLs was given where both are needed.
        StorageError: a service cannot be used.
    """
    directory = home_dir(home)
    if storage_url is None and tracking_uri is None:
        info = stack.up(directory, progress=progress)
        return Services(directory, info.storage_url, info.tracking_uri, info.dashboard_url, embedded=True)
    if storage_url is None:
        raise SearchError(
            "--tracking-uri is given but --storage-url is not: give both, or neither to use the embedded stack"
        )
    if tracking_uri is None and tracking_required:
        raise SearchError(
            "--storage-url is given but --tracking-uri is not: give both, or neither to use the embedded stack"
        )
    url = normalise(storage_url)
    check_database(url)
    if tracking_uri is not None:
        await_server(tracking_uri, patience=patience)
    return Services(directory, url, tracking_uri, os.environ.get(DASHBOARD_URL))


def await_server(uri: str, *, patience: float) -> None:
    """Check the tracking server; for up to `patience` seconds, wait for one that is away.

    Raises:
        StorageError: it does not answer.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            return check_server(uri)
        except StorageError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(1.0)
