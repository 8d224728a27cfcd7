"""What a study and MLflow tell each other: what was done to the study, and what was promoted in MLflow's pages."""

from __future__ import annotations

import logging
from collections.abc import Callable

from hpsearch.search.console import PlainConsole
from hpsearch.search.promotion.registry_watch import notice
from hpsearch.search.services import Services
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.tracking import known_tracking_uri, tracking_of
from hpsearch.storage.attributes import RUN_ID
from hpsearch.storage.errors import StorageError
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.mlflow.health import check_server, one_line
from hpsearch.storage.study_storage import PostgresStorage


def tell_mlflow(services: Services, study: StoredStudy, tell: Callable[[Tracking], object]) -> None:
    """Tell the study's tracking server; one that does not answer costs a warning, for the study goes on without it."""
    if RUN_ID not in study.attrs or known_tracking_uri(services, study) is None:
        return  # nobody has opened a run of the study yet
    try:
        tell(tracking_of(services, study))
    except Exception as error:  # the study is changed already: a server that is away must not hide it
        warn(f"MLflow was not told ({one_line(error)}); it is when the trials run")


def warn(message: str) -> None:
    """Print a warning where errors go."""
    PlainConsole(stderr=True).print(f"warning: {message}")


def notice_promotions(services: Services, storage: PostgresStorage, study: StoredStudy | None = None) -> None:
    """Record what was promoted in the MLflow UI, if MLflow answers; without it, what is recorded is what is told."""
    uri = services.tracking_uri if study is None else known_tracking_uri(services, study)
    if uri is None:
        return
    try:
        check_server(uri)
        tracking = services.open_tracking(uri)
        notice(storage, tracking)
        if study is not None:
            from hpsearch.search.promotion.promote import refresh_evidence

            refresh_evidence(study, tracking)
    except StorageError as error:
        logging.getLogger(__name__).debug("promotions are not noticed: %s", error)
