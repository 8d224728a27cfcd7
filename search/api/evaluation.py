"""Evaluate the winner of a study on the test set."""

from __future__ import annotations

from hpsearch.search.api.opening import publish_change
from hpsearch.search.console import format_command
from hpsearch.search.errors import SearchError
from hpsearch.search.promotion.evaluate_test import Candidate, choose_candidate, evaluate_on_test_set
from hpsearch.search.promotion.evidence_update import refresh_evidence
from hpsearch.search.services import Services
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.study_tracking import open_study_tracking
from hpsearch.search.study.summary import summarise
from hpsearch.search.tracking.study_run import close_study
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.records.test_evaluations import AlreadyEvaluatedError


def choose_test_candidate(
    study: StoredStudy, *, trial: int | None, unconfirmed: bool, refit: bool = False
) -> Candidate:
    """Return the model to evaluate on the test set.

    Raises:
        SearchError: the test set was already evaluated, the finalists have no winner, or the trial is not eligible.
    """
    study.require_search("evaluate the test set of {study!r}")
    try:
        return choose_candidate(study, trial=trial, unconfirmed=unconfirmed, refit=refit)
    except AlreadyEvaluatedError as error:
        raise _as_search_error(study, error) from None


def evaluate_test_set(
    services: Services, study: StoredStudy, *, trial: int | None, unconfirmed: bool, refit: bool = False
) -> dict[str, float]:
    """Evaluate the winner's best weights on the test set, once per study, and return the score of each metric.

    Raises:
        SearchError: `choose` rejects the trial, or the weights are unavailable.
        StorageError: MLflow does not answer.
    """
    candidate = choose_test_candidate(study, trial=trial, unconfirmed=unconfirmed, refit=refit)
    try:
        evaluation = evaluate_on_test_set(study, candidate, open_study_tracking(services, study))
    except AlreadyEvaluatedError as error:
        raise _as_search_error(study, error) from None

    def update(tracking: Tracking) -> None:
        close_study(study, summarise(study), tracking)
        refresh_evidence(study, tracking)

    publish_change(services, study, update)
    return evaluation.scores or {}


def _as_search_error(study: StoredStudy, error: AlreadyEvaluatedError) -> SearchError:
    name = study.spec.name
    return SearchError(f"study {name!r}: {error}; see the scores with {format_command('show', name)}")
