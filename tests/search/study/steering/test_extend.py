"""Changes of the budget while workers claim trials."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import optuna
import psycopg2
import pytest

from hpsearch.search.error_lines import report_errors
from hpsearch.search.errors import SearchError
from hpsearch.search.study.control import extend_study
from hpsearch.search.study.study import StoredStudy, load_study
from hpsearch.storage.attributes import SPEC
from hpsearch.storage.errors import StorageError
from hpsearch.storage.study_storage.storage import PostgresStorage
from hpsearch.storage.trials.claim_results import NoTrialAvailable
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome
from tests.search.study.steering.support import Say, rows, take


@pytest.mark.parametrize(("trials", "budget"), [("+2", 5), ("10", 10), ("2", 2)])
def test_an_extension_applies_to_later_claims(
    say: Say, claims: Claims, storage: PostgresStorage, trials: str, budget: int
) -> None:
    take(claims)
    assert f"study s: budget changed from 3 to {budget} trials; 1 trial started so far" in say(
        "extend", "s", "--trials", trials
    )
    assert load_study(storage, "s").spec.n_trials == budget
    for _ in range(budget - 1):
        take(claims)
    assert claims.claim() == NoTrialAvailable(running_trials=budget)


def test_an_unchanged_budget_is_reported(say: Say, study: optuna.Study) -> None:
    assert "already has a budget of 3 trials" in say("extend", "s", "--trials", "3")


@pytest.mark.parametrize(
    ("trials", "words"),
    [
        ("2", ["--trials 2", "already started 2 trials", "give +1 or more, or a number above 2"]),
        ("0", ["--trials 0"]),
        ("-5", ["--trials '-5'", "+N"]),
        ("+0.5", ["--trials '+0.5'", "+N"]),
        ("many", ["--trials 'many'", "+N"]),
        ("", ["--trials ''", "+N"]),
        ("٣", ["--trials", "+N"]),
        ("+999999999", ["--trials", "1000000"]),
        ("9999999999999", ["--trials"]),
    ],
)
def test_a_wrong_budget_is_rejected_and_changes_nothing(
    say: Say, claims: Claims, storage: PostgresStorage, trials: str, words: list[str]
) -> None:
    take(claims)
    claims.finish_attempt(take(claims), Outcome.RELEASED)  # it waits, but was started
    message = say("extend", "s", "--trials", trials, code=2)
    for word in words:
        assert word in message
    assert load_study(storage, "s").spec.n_trials == 3


def test_an_enqueued_trial_does_not_count_as_started(study: optuna.Study, stored: StoredStudy) -> None:
    study.enqueue_trial({"x": 1})
    assert extend_study(stored, "1").started_trials == 0


@contextmanager
def locked_study(url: str, waiter: threading.Thread) -> Iterator[psycopg2.extensions.cursor]:
    """Lock the study as a claim does, start a thread that needs the lock, and yield once it waits."""
    connection = psycopg2.connect(url.replace("+psycopg2", ""))
    try:
        with connection, connection.cursor() as cursor:
            cursor.execute("SELECT 1 FROM studies FOR UPDATE")
            waiter.start()
            while not rows(
                url, "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            ):
                time.sleep(0.005)
            yield cursor
    finally:
        connection.close()
    waiter.join()


def test_a_trial_that_is_being_claimed_counts_as_started(stored: StoredStudy, database_url: str) -> None:
    refused: list[SearchError] = []

    def extend() -> None:
        try:
            extend_study(stored, "1")
        except SearchError as error:
            refused.append(error)

    with locked_study(database_url, threading.Thread(target=extend)) as cursor:
        cursor.execute("INSERT INTO trials (study_id, number, state) VALUES (%s, 0, 'RUNNING')", (stored.study_id,))
    assert "already started 1 trials" in str(refused[0])
    assert load_study(stored.storage, "s").spec.n_trials == 3


def test_a_waiting_claim_uses_the_new_budget(claims: Claims, database_url: str) -> None:
    take(claims)
    got: list[object] = []
    with locked_study(database_url, threading.Thread(target=lambda: got.append(claims.claim()))) as cursor:
        cursor.execute(
            "UPDATE study_user_attributes SET value_json = jsonb_set(value_json::jsonb, '{n_trials}', '1')::text "
            "WHERE key = %s",
            (SPEC,),
        )
    assert got == [NoTrialAvailable(running_trials=1)]


def test_a_concurrently_deleted_study_is_an_error(stored: StoredStudy, storage: PostgresStorage) -> None:
    storage.delete_study(stored.study_id)
    with pytest.raises(StorageError, match="deleted"):
        extend_study(stored, "+1")


def test_a_study_that_was_deleted_during_a_command_is_an_error(
    stored: StoredStudy, storage: PostgresStorage, capsys: pytest.CaptureFixture[str]
) -> None:
    storage.delete_study(stored.study_id)
    assert report_errors(lambda: storage.delete_study(stored.study_id) or 0) == 2
    assert (
        capsys.readouterr().err
        == "hpsearch: another command has deleted the study; list the studies with hpsearch studies\n"
    )
