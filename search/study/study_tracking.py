"""The tracking server of a study."""

from __future__ import annotations

from dataclasses import replace

from hpsearch.search.errors import SearchError
from hpsearch.search.services import Services, probe_tracking
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import TRACKING_URI
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.mlflow.health import check_server


def find_tracking_uri(services: Services, study: StoredStudy) -> str | None:
    """Return the URI of the study's tracking server; None if the URI is not known yet."""
    return services.tracking_uri or study.attrs.get(TRACKING_URI)


def get_tracking_uri(services: Services, study: StoredStudy) -> str:
    """Return the URI of the study's tracking server.

    Raises:
        SearchError: the URI is unknown.
    """
    if (uri := find_tracking_uri(services, study)) is None:
        raise SearchError(f"study {study.spec.name!r} has no tracking server; give --tracking-uri")
    return uri


def open_study_tracking(services: Services, study: StoredStudy) -> Tracking:
    """Return a client of the study's tracking server, after a health check.

    Raises:
        SearchError: the URI is unknown.
        StorageError: the server does not answer.
    """
    uri = get_tracking_uri(services, study)
    check_server(uri)
    return services.open_tracking(uri)


def resolve_tracking(services: Services, study: StoredStudy, *, required: bool = False) -> Services:
    """Return the services with the study's tracking server; `tracking_error` is set if the server does not answer.

    Raises:
        SearchError: the URI is unknown.
        StorageError: the URI is invalid, or the server is `required` and does not answer.
    """
    uri = get_tracking_uri(services, study)
    return replace(services, tracking_uri=uri, tracking_error=probe_tracking(uri, required=required))
