"""Which services a command uses: the given URLs, or the embedded stack."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hpsearch.search.errors import SearchError, nearest
from hpsearch.storage.database.connect import check_database
from hpsearch.storage.embedded import stack
from hpsearch.storage.home import home_dir
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.mlflow.health import TrackingAwayError, check_server
from hpsearch.storage.urls import Addresses, normalise

# Where browsers reach the UIs, when that is not where the workers do (in containers, behind a proxy): for links.
DASHBOARD_URL = "HPSEARCH_DASHBOARD_URL"
MLFLOW_UI_URL = "HPSEARCH_MLFLOW_UI_URL"

# The dashboard of the embedded stack: that of hpsearch, which also records promotions made in MLflow's UI.
DASHBOARD = (sys.executable, "-P", "-m", "hpsearch", "serve", "dashboard")


@dataclass(frozen=True)
class Services:
    """Where a search is kept. Without a dashboard of ours its URL is None; a worker may learn the tracking later."""

    home: Path
    storage_url: str
    tracking_uri: str | None
    dashboard_url: str | None
    checkpoint_url: str | None = None  # that was given; without it the study's own is used
    embedded: bool = False
    tracking_away: str | None = None  # why the tracking server does not answer

    @property
    def addresses(self) -> Addresses:
        """The addresses for a worker."""
        return {
            "storage_url": self.storage_url,
            "tracking_uri": self.tracking_uri,
            "checkpoint_url": self.checkpoint_url,
            "home": str(self.home),
        }

    def open_tracking(self, uri: str | None = None) -> Tracking:
        """Return the tracking server, by default the one that was given."""
        address = uri or self.tracking_uri
        assert address is not None
        return Tracking(address, ui_url=os.environ.get(MLFLOW_UI_URL))


def with_environment(where: Addresses) -> Addresses:
    """Return the given addresses; the environment has those that are missing (HPSEARCH_STORAGE_URL and so on).

    Raises:
        SearchError: a name is none of an address, for instance a misspelt one.
    """
    known = Addresses.__annotations__
    if unknown := sorted(where.keys() - known.keys()):
        raise SearchError(f"unknown setting {unknown[0]!r}{nearest(unknown[0], known)}")
    found: Any = {name: where.get(name) or os.environ.get(f"HPSEARCH_{name.upper()}") or None for name in known}
    return cast(Addresses, found)


def find_services(
    where: Addresses,
    *,
    both: bool = False,
    tracking_required: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Services:
    """Return the services at these addresses, checked, or the embedded stack's, started if need be.

    Args:
        where: addresses that were given.
        both: whether a database without the address of a tracking server is rejected.
        tracking_required: whether that server has to answer now.
        progress: receives each step.

    Raises:
        SearchError: only one of the two URLs was given where both are needed.
        StorageError: a service cannot be used.
    """
    check_pair(where, both=both)
    directory, checkpoint_url = home_dir(where.get("home")), where.get("checkpoint_url")
    if (storage_url := where.get("storage_url")) is None:
        info = stack.up(directory, dashboard=DASHBOARD, progress=progress)
        return Services(
            directory, info.storage_url, info.tracking_uri, info.dashboard_url, checkpoint_url, embedded=True
        )
    url, uri = normalise(storage_url), where.get("tracking_uri")
    check_database(url)
    away = None if uri is None else why_away(uri, required=tracking_required)
    return Services(directory, url, uri, os.environ.get(DASHBOARD_URL), checkpoint_url, tracking_away=away)


def check_pair(where: Addresses, *, both: bool = True) -> None:
    """Reject one of the two URLs without the other, and a database that is not a Postgres; no service is asked.

    Raises:
        SearchError: only one of the two URLs was given where `both` are needed.
        StorageError: the database's URL is no URL of a Postgres.
    """
    storage_url, tracking_uri = where.get("storage_url"), where.get("tracking_uri")
    if storage_url is not None:
        normalise(storage_url)
    for given, missing, flags in (
        (tracking_uri, storage_url, ("--tracking-uri", "--storage-url")),
        (storage_url if both else None, tracking_uri, ("--storage-url", "--tracking-uri")),
    ):
        if given is not None and missing is None:
            raise SearchError(
                f"{flags[0]} is given but {flags[1]} is not: give both, or neither to use the embedded stack"
            )


def why_away(uri: str, *, required: bool = False) -> str | None:
    """Ask the tracking server; return why it does not answer, if it does not: what is logged can wait for it.

    Raises:
        StorageError: the address is wrong, or the server is `required` and does not answer.
    """
    try:
        check_server(uri)
    except TrackingAwayError as error:
        if required:
            raise
        return str(error)
    return None
