"""The services that a command uses: services at given URLs, or the embedded stack."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from hpsearch.search.errors import SearchError, suggest_names
from hpsearch.storage.database.connect import check_database
from hpsearch.storage.embedded import stack
from hpsearch.storage.home import prepare_home
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.mlflow.credentials import allow_credentials, is_configured
from hpsearch.storage.mlflow.health import TrackingUnavailableError, check_server
from hpsearch.storage.urls import Addresses, normalise_url

# Addresses of the UIs for browsers, if they differ from those for workers (containers, proxies); used in links.
DASHBOARD_URL = "HPSEARCH_DASHBOARD_URL"
MLFLOW_UI_URL = "HPSEARCH_MLFLOW_UI_URL"

# Optuna's own dashboard does not record promotions made in MLflow's UI.
DASHBOARD_COMMAND = (sys.executable, "-P", "-m", "hpsearch", "serve", "dashboard")


@dataclass(frozen=True)
class Services:
    """Addresses of the services of a search.

    Attributes:
        home: home folder, with the embedded stack, runs and logs.
        storage_url: URL of the Postgres database with the studies.
        tracking_uri: URI of the MLflow server; None if it is not given and will be read from the study.
        dashboard_url: URL of the dashboard; None if there is no dashboard.
        checkpoint_url: given address of the checkpoints; None uses the address that is stored in the study.
        is_embedded: whether the services are those of the embedded stack.
        tracking_error: why the tracking server is unavailable; None if it answers.
    """

    home: Path
    storage_url: str = field(repr=False)  # may contain a password
    tracking_uri: str | None
    dashboard_url: str | None
    checkpoint_url: str | None = None
    is_embedded: bool = False
    tracking_error: str | None = None

    @property
    def addresses(self) -> Addresses:
        """The addresses of the services, as options of a worker.

        A worker trusts a tracking server in its options, so they omit an address that comes from the study. The worker
        reads it there.
        """
        uri = self.tracking_uri
        return {
            "storage_url": self.storage_url,
            "tracking_uri": uri if uri is not None and is_configured(uri) else None,
            "checkpoint_url": self.checkpoint_url,
            "home": str(self.home),
        }

    def open_tracking(self, uri: str | None = None) -> Tracking:
        """Return a client of the tracking server.

        Args:
            uri: URI of the server; None uses `tracking_uri`.
        """
        address = uri or self.tracking_uri
        assert address is not None
        return Tracking(address, ui_url=os.environ.get(MLFLOW_UI_URL))

    def open_available_tracking(self) -> Tracking:
        """Return a client of the tracking server, after a quick check that the server answers.

        Raises:
            TrackingUnavailableError: the server does not answer.
        """
        tracking = self.open_tracking()
        check_server(tracking.uri)
        return tracking


def resolve_addresses(where: Addresses) -> Addresses:
    """Return the given addresses; missing addresses come from environment variables such as HPSEARCH_STORAGE_URL.

    Raises:
        SearchError: `where` has a key that is not the name of an address.
    """
    known = Addresses.__annotations__
    if unknown := sorted(where.keys() - known.keys()):
        raise SearchError(f"unknown setting {unknown[0]!r}{suggest_names(unknown[0], known)}")
    found: Any = {name: where.get(name) or os.environ.get(f"HPSEARCH_{name.upper()}") or None for name in known}
    return cast(Addresses, found)


def find_services(
    where: Addresses,
    *,
    both: bool = False,
    tracking_required: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Services:
    """Return the services at the given addresses; if there are none, start and return the embedded stack.

    Args:
        where: the given addresses.
        both: whether a database URL without a tracking URI is an error.
        tracking_required: whether an unavailable tracking server is an error.
        progress: called with the name of each step.

    Raises:
        SearchError: `where` has a tracking URI without a database URL, or, with `both`, only a database URL.
        StorageError: a service is unusable.
    """
    check_pair(where, both=both)
    home, checkpoint_url = prepare_home(where.get("home")), where.get("checkpoint_url")
    if (storage_url := where.get("storage_url")) is None:
        info = stack.up(home, dashboard=DASHBOARD_COMMAND, progress=progress)
        allow_credentials(info.tracking_uri)
        return Services(home, info.storage_url, info.tracking_uri, info.dashboard_url, checkpoint_url, is_embedded=True)
    url, uri = normalise_url(storage_url), where.get("tracking_uri")
    check_database(url)
    if uri is not None:
        allow_credentials(uri)
    tracking_error = None if uri is None else probe_tracking(uri, required=tracking_required)
    return Services(home, url, uri, os.environ.get(DASHBOARD_URL), checkpoint_url, tracking_error=tracking_error)


def check_pair(where: Addresses, *, both: bool = True) -> None:
    """Check the database URL and the tracking URI without connecting to a service.

    Args:
        where: the given addresses.
        both: whether a database URL without a tracking URI is an error.

    Raises:
        SearchError: `where` has a tracking URI without a database URL, or, with `both`, only a database URL.
        StorageError: the database URL is not a Postgres URL.
    """
    storage_url, tracking_uri = where.get("storage_url"), where.get("tracking_uri")
    if storage_url is not None:
        normalise_url(storage_url)
    for given, missing, flags in (
        (tracking_uri, storage_url, ("--tracking-uri", "--storage-url")),
        (storage_url if both else None, tracking_uri, ("--storage-url", "--tracking-uri")),
    ):
        if given is not None and missing is None:
            raise SearchError(f"{flags[0]} needs {flags[1]}; give both, or neither to use the embedded services")


def probe_tracking(uri: str, *, required: bool = False) -> str | None:
    """Return why the tracking server is unavailable; None if it answers.

    Args:
        uri: URI of the server.
        required: whether an unavailable server is an error. If not, records stay in the outbox.

    Raises:
        StorageError: the URI is invalid, or the server is `required` and unavailable.
    """
    try:
        check_server(uri)
    except TrackingUnavailableError as error:
        if required:
            raise
        return str(error)
    return None
