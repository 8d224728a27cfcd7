"""The database prevents a second evaluation of a test set by any program."""

from __future__ import annotations

import math
import threading

import optuna
import psycopg2
import pytest
import sqlalchemy as sa

from hpsearch.storage.errors import StorageError
from hpsearch.storage.records import test_evaluations
from hpsearch.storage.records.test_evaluations import (
    AlreadyEvaluatedError,
    read_test_evaluation,
    record_test_evaluation,
    write_scores,
)
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage

SHA, OTHER = "a" * 64, "b" * 64


@pytest.fixture
def storage(database_url: str) -> PostgresStorage:
    return open_storage(database_url, application_name="test")


@pytest.fixture
def study_id(storage: PostgresStorage) -> int:
    return optuna.create_study(study_name="s", storage=storage)._study_id


def opened(
    storage: PostgresStorage, study_id: int, *, trial: int = 3, sha256: str = SHA
) -> test_evaluations.TestEvaluation:
    return record_test_evaluation(
        storage.engine, study_id, trial_number=trial, model_sha256=sha256, opened_by="ann@host", finalists="s.finalists"
    )


def test_a_test_evaluation_of_a_refit_is_bound_to_it(storage: PostgresStorage, study_id: int) -> None:
    arguments = {"trial_number": 3, "model_sha256": SHA, "opened_by": "ann@host", "finalists": "s.finalists"}
    made = record_test_evaluation(storage.engine, study_id, **arguments, refit="s.refit")  # type: ignore[arg-type]
    assert (made.refit, made.model_description) == ("s.refit", "the refit of trial 3")
    with storage.engine.begin() as connection, pytest.raises(sa.exc.DBAPIError, match="was opened at"):
        connection.execute(sa.text("UPDATE hpsearch_test_openings SET refit = NULL"))
    assert read_test_evaluation(storage.engine, study_id) == made


def test_a_test_evaluation_is_recorded_before_its_scores(storage: PostgresStorage, study_id: int) -> None:
    assert read_test_evaluation(storage.engine, study_id) is None
    made = opened(storage, study_id)
    assert read_test_evaluation(storage.engine, study_id) == made
    assert (made.trial_number, made.model_sha256, made.opened_by) == (3, SHA, "ann@host")
    assert (made.scores, made.finalists) == (None, "s.finalists")
    filled = write_scores(storage.engine, study_id, made, {"accuracy": 0.1 + 0.2, "auroc": math.nan})
    assert filled.scores is not None
    assert filled.scores["accuracy"] == 0.1 + 0.2
    assert math.isnan(filled.scores["auroc"])
    assert filled.opened_at == made.opened_at


def test_only_the_same_model_can_complete_an_interrupted_evaluation(storage: PostgresStorage, study_id: int) -> None:
    made = opened(storage, study_id)
    for other in ({"trial": 4}, {"sha256": OTHER}):
        with pytest.raises(
            AlreadyEvaluatedError, match=r"evaluated on \d{4}-\d\d-\d\d at \d\d:\d\d UTC by ann@host for trial 3"
        ):
            opened(storage, study_id, **other)
    assert opened(storage, study_id) == made
    write_scores(storage.engine, study_id, made, {"accuracy": 0.9})
    with pytest.raises(AlreadyEvaluatedError):
        opened(storage, study_id)


def test_one_of_two_concurrent_score_writes_is_rejected(storage: PostgresStorage, study_id: int) -> None:
    made, again = opened(storage, study_id), opened(storage, study_id)
    write_scores(storage.engine, study_id, made, {"accuracy": 0.9})
    with pytest.raises(AlreadyEvaluatedError):
        write_scores(storage.engine, study_id, again, {"accuracy": 0.8})
    found = read_test_evaluation(storage.engine, study_id)
    assert found is not None
    assert found.scores == {"accuracy": 0.9}


def test_one_of_many_concurrent_test_evaluations_is_recorded(storage: PostgresStorage, study_id: int) -> None:
    outcomes: list[str] = []
    barrier = threading.Barrier(5)

    def attempt(trial: int) -> None:
        barrier.wait()
        try:
            opened(storage, study_id, trial=trial)
            outcomes.append("opened")
        except AlreadyEvaluatedError:
            outcomes.append("refused")

    threads = [threading.Thread(target=attempt, args=(trial,)) for trial in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["opened", *["refused"] * 4]


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM hpsearch_test_openings",
        "UPDATE hpsearch_test_openings SET trial_number = 4",
        "UPDATE hpsearch_test_openings SET model_sha256 = 'c'",
        "UPDATE hpsearch_test_openings SET opened_at = now()",
        "UPDATE hpsearch_test_openings SET opened_by = 'bob'",
        "UPDATE hpsearch_test_openings SET finalists = NULL",
        "UPDATE hpsearch_test_openings SET study_id = study_id + 1",
        "UPDATE hpsearch_test_openings SET scores = '{\"accuracy\": 1}', trial_number = 4",
        "INSERT INTO hpsearch_test_openings (study_id, trial_number, model_sha256, opened_by) "
        "SELECT study_id, 4, 'c', 'bob' FROM studies",
        "TRUNCATE hpsearch_test_openings",
        "ALTER TABLE hpsearch_test_openings DISABLE TRIGGER ALL",
    ],
)
def test_a_worker_role_cannot_change_test_evaluations_by_sql(
    storage: PostgresStorage, study_id: int, database_url: str, statement: str, scored: bool
) -> None:
    made = opened(storage, study_id)
    if scored:
        made = write_scores(storage.engine, study_id, made, {"accuracy": 0.9})
    with (
        psycopg2.connect(database_url.replace("+psycopg2", "")) as connection,
        connection.cursor() as cursor,
        pytest.raises(psycopg2.Error),
    ):
        cursor.execute(statement)
    connection.close()
    assert read_test_evaluation(storage.engine, study_id) == made


def test_scores_are_not_overwritten(storage: PostgresStorage, study_id: int) -> None:
    write_scores(storage.engine, study_id, opened(storage, study_id), {"accuracy": 0.9})
    with pytest.raises(sa.exc.DBAPIError, match="was opened at"), storage.engine.begin() as connection:
        connection.execute(sa.text("UPDATE hpsearch_test_openings SET scores = '{}'"))


def test_a_test_evaluation_is_deleted_with_its_study(storage: PostgresStorage, study_id: int) -> None:
    made = opened(storage, study_id)
    storage.delete_study(study_id)
    assert read_test_evaluation(storage.engine, study_id) is None
    with pytest.raises(StorageError, match="the study was deleted"):
        write_scores(storage.engine, study_id, made, {})
    with pytest.raises(StorageError, match="the study was deleted"):
        opened(storage, study_id)
