"""What the reading verbs share: the study storage, opened and checked, and a look at what was promoted elsewhere."""

from __future__ import annotations

import logging

import optuna

from search.errors import SearchError
from search.services import Services, find_services
from search.study.study import StoredStudy
from storage.attributes import TRACKING_URI
from storage.errors import StorageError
from storage.mlflow.client import Tracking
from storage.mlflow.health import check_server
from storage.study_storage import PostgresStorage
from storage.study_storage.opening import open_storage


def open_for_reading(
    storage_url: str | None, tracking_uri: str | None, home: str | None
) -> tuple[Services, PostgresStorage]:
    """Return the services and the study storage."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    services = find_services(storage_url, tracking_uri if storage_url else None, home=home)
    return services, open_storage(services.storage_url, application_name="hpsearch read")


def notice_promotions(services: Services, storage: PostgresStorage, study: StoredStudy | None = None) -> None:
    """Record what was promoted in the MLflow UI, if MLflow answers; without it, what is recorded is what is told."""
    from search.promotion.registry_watch import notice

    uri = services.tracking_uri or (study.attrs.get(TRACKING_URI) if study is not None else None)
    if uri is None:
        return
    try:
        check_server(uri)
        tracking = services.open_tracking(uri)
        notice(storage, tracking)
        if study is not None:
            from search.promotion.promote import refresh_evidence

            refresh_evidence(study, tracking)
    except StorageError as error:
        logging.getLogger(__name__).debug("promotions are not noticed: %s", error)


def tracking_of(services: Services, study: StoredStudy) -> Tracking:
    """Return the tracking server that was given, or else the one that the study names.

    Raises:
        SearchError: there is neither.
        StorageError: it does not answer.
    """
    uri = services.tracking_uri or study.attrs.get(TRACKING_URI)
    if uri is None:
        raise SearchError(f"study {study.spec.name!r} names no tracking server: give --tracking-uri")
    check_server(uri)
    return services.open_tracking(uri)
