"""What the reading verbs share: the study storage, opened and checked."""

from __future__ import annotations

import optuna

from search.services import Services, find_services
from storage.studies import open_storage
from storage.study_storage import PostgresStorage


def open_for_reading(
    storage_url: str | None, tracking_uri: str | None, home: str | None
) -> tuple[Services, PostgresStorage]:
    """Return the services and the study storage."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    services = find_services(storage_url, tracking_uri if storage_url else None, home=home)
    return services, open_storage(services.storage_url, application_name="hpsearch read")
