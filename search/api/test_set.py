"""The sealed test set of a study, opened for the winner."""

from __future__ import annotations

from hpsearch.search.api.telling import tell_mlflow
from hpsearch.search.console import command
from hpsearch.search.errors import SearchError
from hpsearch.search.promotion.open_test import Candidate, choose_candidate, open_for
from hpsearch.search.promotion.promote import refresh_evidence
from hpsearch.search.publish.study import close_study
from hpsearch.search.services import Services
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.summary import summarise
from hpsearch.search.study.tracking import tracking_of
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.records.test_openings import AlreadyOpenError


def choose(study: StoredStudy, *, trial: int | None, unconfirmed: bool, refit: bool = False) -> Candidate:
    """Return for whom the test set of a study is to be opened.

    Raises:
        SearchError: it was opened, no finalists have decided, or the trial is none to open it for.
    """
    if (of := study.spec.finalists_of) is not None:
        raise SearchError(f"study {study.spec.name!r} holds {of.what}: open the test set of {of.study!r}")
    try:
        return choose_candidate(study, trial=trial, unconfirmed=unconfirmed, refit=refit)
    except AlreadyOpenError as error:
        raise _opened(study, error) from None


def open_test_set(
    services: Services, study: StoredStudy, *, trial: int | None, unconfirmed: bool, refit: bool = False
) -> dict[str, float]:
    """Open the test set, once in the life of a study; return the scores of the winner's best weights by their metrics.

    Raises:
        SearchError: as `choose`, or the weights are not to be had.
        StorageError: MLflow does not answer.
    """
    candidate = choose(study, trial=trial, unconfirmed=unconfirmed, refit=refit)
    try:
        opening = open_for(study, candidate, tracking_of(services, study))
    except AlreadyOpenError as error:
        raise _opened(study, error) from None

    def tell(tracking: Tracking) -> None:
        close_study(study, summarise(study), tracking)
        refresh_evidence(study, tracking)

    tell_mlflow(services, study, tell)
    return opening.scores or {}


def _opened(study: StoredStudy, error: AlreadyOpenError) -> SearchError:
    name = study.spec.name
    return SearchError(f"study {name!r}: {error}; see it with: {command('show', name)}")
