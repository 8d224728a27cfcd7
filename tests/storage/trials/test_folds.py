"""Trials with folds: the values of the metric in each fold are stored with the report of an epoch."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from optuna.storages import BaseStorage
from optuna.study import StudyDirection

from hpsearch.storage.trials.budget import create_spending
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome
from hpsearch.storage.trials.history import read_epoch_values, read_fold_values
from hpsearch.storage.trials.reopening import reopen_trial
from tests.storage.trials.support import budget, take


@pytest.fixture
def study_id(storage: BaseStorage) -> int:
    study_id = storage.create_new_study([StudyDirection.MAXIMIZE], "s")
    budget(storage, study_id, n_trials=8)
    return study_id


@pytest.fixture
def claims(engine: sa.Engine, study_id: int) -> Claims:
    return Claims(engine, study_id, worker="w", retry_seconds=10.0)


def test_an_epoch_stores_its_folds_once_with_one_statement(claims: Claims, engine: sa.Engine, study_id: int) -> None:
    claim = take(claims)
    said: list[str] = []
    sa.event.listen(engine, "before_cursor_execute", lambda *arguments: said.append(arguments[2]))
    claims.report(claim, 0, 0.5, folds=[0.25, 0.75])
    assert len(said) == 1
    claims.report(claim, 0, 0.6, folds=[0.6, 0.6])  # a retried epoch keeps its values
    claims.report(claim, 1, float("nan"), folds=[float("inf"), float("-inf")])
    assert read_fold_values(engine, claim.trial_id) == {0: [0.25, 0.75], 1: [float("inf"), float("-inf")]}
    assert read_epoch_values(engine, study_id) == {}, "the folds are not metrics"


def test_a_multi_objective_study_stores_metrics_and_folds(claims: Claims, engine: sa.Engine, study_id: int) -> None:
    claim = take(claims)
    claims.report(claim, 0, 0.5, metrics=[0.5, 9.0], folds=[0.25, 0.75])
    assert read_epoch_values(engine, study_id) == {claim.trial_id: {0: [0.5, 9.0]}}
    assert read_fold_values(engine, claim.trial_id) == {0: [0.25, 0.75]}


def test_an_epoch_beyond_the_budget_stores_no_folds(engine: sa.Engine, study_id: int) -> None:
    with engine.begin() as connection:
        create_spending(connection, study_id, epochs=1, seconds=None)
    claims = Claims(engine, study_id, worker="w", retry_seconds=10.0, metered_epochs=4)
    claim = take(claims)
    counted = [claims.report(claim, step, 0.5, folds=[0.25, 0.75]).is_counted for step in range(2)]
    assert counted == [True, False]
    assert list(read_fold_values(engine, claim.trial_id)) == [0]


def test_a_trial_that_is_retried_from_the_start_loses_its_folds(
    claims: Claims, engine: sa.Engine, study_id: int
) -> None:
    claim = take(claims)
    claims.report(claim, 0, 0.5, folds=[0.25, 0.75])
    claims.finish_attempt(claim, Outcome.FAILED)
    assert reopen_trial(engine, study_id, claim.trial_id, from_start=True)[0]
    assert read_fold_values(engine, claim.trial_id) == {}
