"""A study's tracking server: the one that was given, or else the one that the study names."""

from __future__ import annotations

from dataclasses import replace

from hpsearch.search.errors import SearchError
from hpsearch.search.services import Services, why_away
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import TRACKING_URI
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.mlflow.health import check_server


def known_tracking_uri(services: Services, study: StoredStudy) -> str | None:
    """Return the address of the study's tracking server; None where nobody has named one yet."""
    return services.tracking_uri or study.attrs.get(TRACKING_URI)


def tracking_uri_of(services: Services, study: StoredStudy) -> str:
    """Return the address of the study's tracking server.

    Raises:
        SearchError: nobody has named one.
    """
    if (uri := known_tracking_uri(services, study)) is None:
        raise SearchError(f"study {study.spec.name!r} names no tracking server: give --tracking-uri")
    return uri


def tracking_of(services: Services, study: StoredStudy) -> Tracking:
    """Return the study's tracking server, which answers.

    Raises:
        SearchError: nobody has named one.
        StorageError: it does not answer.
    """
    uri = tracking_uri_of(services, study)
    check_server(uri)
    return services.open_tracking(uri)


def with_tracking(services: Services, study: StoredStudy, *, required: bool = False) -> Services:
    """Return the services with the study's tracking server, and why it does not answer, if it does not.

    Raises:
        SearchError: nobody has named one.
        StorageError: its address is wrong, or it is `required` and does not answer.
    """
    uri = tracking_uri_of(services, study)
    return replace(services, tracking_uri=uri, tracking_away=why_away(uri, required=required))
