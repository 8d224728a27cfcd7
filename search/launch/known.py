"""Whether the study that a fleet is to join is there, where its database can be asked."""

from __future__ import annotations

from hpsearch.search.launch.settings import Launch
from hpsearch.search.services import find_services
from hpsearch.search.study.study import load_study
from hpsearch.storage.errors import StorageError
from hpsearch.storage.study_storage.opening import open_storage


def why_unknown(launch: Launch) -> str | None:
    """Return why the database could not be asked for the study, or None where it has it.

    Raises:
        SearchError: it answers, and has no such study.
    """
    if launch.engine == "kubernetes" and launch.storage_url is None:
        return "its database is in the Secret"
    try:
        services = find_services(launch.storage_url, None, home=launch.home)
        storage = open_storage(services.storage_url, application_name="hpsearch fleet print")
    except StorageError as error:
        return str(error)
    load_study(storage, launch.study)
    return None
