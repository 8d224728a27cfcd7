"""Stopping, starting and extending a study, trying a trial again, and looking at one: from anywhere."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import optuna
import psycopg2
import pytest
from optuna.trial import TrialState, create_trial

from search.cli import _run
from search.control import extend_study, retry_trial, start_study, stop_study
from search.errors import SearchError
from search.study import INFEASIBLE, PRUNING, StudyHandle, load_study
from storage.claims import REASON, SPEC, STOPPED, Claim, Claims, Lost, Nothing, Stopped
from storage.errors import StorageError
from storage.rungs import rung_key
from storage.studies import open_storage
from storage.study_storage import PostgresStorage
from storage.worker_process import current_process
from tests.search.pruning.test_reasons import spec_of


@pytest.fixture
def storage(database_url: str) -> PostgresStorage:
    return open_storage(database_url, application_name="test")


@pytest.fixture
def study(storage: PostgresStorage) -> optuna.Study:
    study = optuna.create_study(study_name="s", direction="maximize", storage=storage)
    spec = spec_of(name="successive_halving", reduction_factor=2)
    storage.set_study_user_attr(study._study_id, SPEC, {**spec.model_dump(), "n_trials": 3, "retries": 1})
    return study


@pytest.fixture
def handle(study: optuna.Study, storage: PostgresStorage) -> StudyHandle:
    return load_study(storage, "s")


@pytest.fixture
def claims(study: optuna.Study, storage: PostgresStorage) -> Claims:
    return Claims(storage.engine, study._study_id, worker="host:1")


def take(claims: Claims) -> Claim:
    claim = claims.claim()
    assert isinstance(claim, Claim)
    return claim


Say = Callable[..., str]


@pytest.fixture
def say(database_url: str, capsys: pytest.CaptureFixture[str]) -> Say:
    """Run a verb on the study and return what it prints; with `code` 2, its one line of complaint."""

    def run(*arguments: str, code: int = 0) -> str:
        assert _run([*arguments, "--storage-url", database_url]) == code
        captured = capsys.readouterr()
        if code:
            assert captured.err.count("\n") == 1, captured.err
            assert captured.err.startswith("hpsearch: ")
        return captured.err if code else captured.out

    return run


# Stop and start


def test_a_stopped_study_hands_out_nothing_and_tells_running_trials_to_stop(say: Say, claims: Claims, handle) -> None:
    claim = take(claims)
    said = say("stop", "s")
    assert "stopped s" in said
    assert "running trials: 1" in said
    assert "start s" in said
    assert claims.report(claim, 0, 0.5), "a running trial is to be given back"
    stopped = claims.claim()
    assert isinstance(stopped, Stopped)
    assert re.fullmatch(r"by \S+@\S+ at \d{4}-\d\d-\d\d \d\d:\d\d UTC", stopped.why)
    assert stopped.why in say("stop", "s"), "the second one says who was first"
    assert stopped.why in say("show", "s")
    assert "s (stopped)" in say("studies")


def test_a_started_study_goes_on(say: Say, claims: Claims, handle) -> None:
    assert "was not stopped" in say("start", "s")
    assert STOPPED not in handle.attrs
    stop_study(handle)
    assert "started s, which was stopped by " in say("start", "s")
    claim = take(claims)
    assert not claims.report(claim, 0, 0.5)
    assert start_study(handle) is None


def test_stop_can_wait_until_nothing_runs(say: Say, claims: Claims) -> None:
    claims.settle(take(claims), "WAITING", "released")
    assert "running" not in say("stop", "s", "--wait")


# Extend


@pytest.mark.parametrize(("trials", "budget"), [("+2", 5), ("10", 10), ("2", 2)])
def test_the_budget_is_changed_for_claims_to_come(
    say: Say, claims: Claims, storage: PostgresStorage, trials: str, budget: int
) -> None:
    take(claims)
    assert f"s: 3 -> {budget} trials, 1 of them are started" in say("extend", "s", "--trials", trials)
    assert load_study(storage, "s").spec.n_trials == budget
    for _ in range(budget - 1):
        take(claims)
    assert claims.claim() == Nothing(running=budget)


def test_a_budget_that_is_the_same_is_told(say: Say, study: optuna.Study) -> None:
    assert "has a budget of 3 trials already" in say("extend", "s", "--trials", "3")


@pytest.mark.parametrize(
    ("trials", "words"),
    [
        ("2", ["--trials 2", "2 trials", "started already", "+N"]),
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
def test_a_wrong_budget_is_refused_and_changes_nothing(
    say: Say, claims: Claims, storage: PostgresStorage, trials: str, words: list[str]
) -> None:
    take(claims)
    claims.settle(take(claims), "WAITING", "released")  # it waits, and was started
    message = say("extend", "s", "--trials", trials, code=2)
    for word in words:
        assert word in message
    assert load_study(storage, "s").spec.n_trials == 3


def test_a_trial_that_somebody_enqueued_is_not_started_yet(study: optuna.Study, handle: StudyHandle) -> None:
    study.enqueue_trial({"x": 1})
    assert extend_study(handle, "1").started == 0


@contextmanager
def locked_study(url: str, waiter: threading.Thread) -> Iterator[psycopg2.extensions.cursor]:
    """Lock the study as a claim does, start a thread that has to wait for it, and yield once it waits."""
    connection = psycopg2.connect(url.replace("+psycopg2", ""))
    try:
        with connection, connection.cursor() as cursor:
            cursor.execute("SELECT 1 FROM studies FOR UPDATE")
            waiter.start()
            while not rows(url, "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"):
                time.sleep(0.005)
            yield cursor
    finally:
        connection.close()
    waiter.join()


def test_a_trial_that_is_being_claimed_counts_as_started(handle: StudyHandle, database_url: str) -> None:
    refused: list[SearchError] = []

    def extend() -> None:
        try:
            extend_study(handle, "1")
        except SearchError as error:
            refused.append(error)

    with locked_study(database_url, threading.Thread(target=extend)) as cursor:
        cursor.execute("INSERT INTO trials (study_id, number, state) VALUES (%s, 0, 'RUNNING')", (handle.study_id,))
    assert "--trials 1: 1 trials" in str(refused[0])
    assert load_study(handle.storage, "s").spec.n_trials == 3


def test_a_claim_that_waits_meanwhile_has_the_new_budget(claims: Claims, database_url: str) -> None:
    take(claims)
    got: list[object] = []
    with locked_study(database_url, threading.Thread(target=lambda: got.append(claims.claim()))) as cursor:
        cursor.execute(
            "UPDATE study_user_attributes SET value_json = jsonb_set(value_json::jsonb, '{n_trials}', '1')::text "
            "WHERE key = %s",
            (SPEC,),
        )
    assert got == [Nothing(running=1)]


def test_a_study_that_was_deleted_meanwhile_is_told(handle: StudyHandle, storage: PostgresStorage) -> None:
    storage.delete_study(handle.study_id)
    with pytest.raises(StorageError, match="deleted"):
        extend_study(handle, "+1")


# Retry


def failed(claims: Claims, *, epochs: int = 0, checkpoint: int | None = None, state: str = "FAIL") -> Claim:
    """Run a trial that fails, or is infeasible, after some epochs; `checkpoint` is the last one that has one."""
    claim = take(claims)
    for epoch in range(epochs):
        kept = Kept(f"{epoch}.pt") if checkpoint is not None and epoch <= checkpoint else None
        claims.report(claim, epoch, 0.1 * epoch, kept)
    if state == "FAIL":
        claims.settle(claim, "FAIL", "failed", attrs={REASON: "a bug"})
    else:
        claims.report(claim, epochs, math.nan)
        claims.settle(claim, "PRUNED", "infeasible", value=0.5, attrs={REASON: "NaN", INFEASIBLE: True})
    return claim


class Kept:
    """A checkpoint as the database knows it."""

    def __init__(self, path: str) -> None:
        self.path, self.sha256, self.size = path, "0" * 64, 1


def test_a_failed_trial_is_the_next_to_be_run_with_its_number_and_parameters(
    say: Say, claims: Claims, study: optuna.Study, storage: PostgresStorage
) -> None:
    claim = failed(claims)
    other = take(claims)
    storage.set_trial_param(other.trial_id, "x", 0.25, optuna.distributions.FloatDistribution(0, 1))
    claims.settle(other, "FAIL", "failed", attrs={REASON: "a bug"})
    assert "trial 1 waits to be run again, from its beginning" in say("retry", "s", "--trial", "1")
    assert [t.state.name for t in study.trials] == ["FAIL", "WAITING"]
    again = take(claims)
    assert (again.trial_id, again.number, again.attempt) == (other.trial_id, 1, 2)
    trial = study.trials[1]
    assert (trial.state, trial.params, trial.datetime_complete) == (TrialState.RUNNING, {"x": 0.25}, None)
    assert REASON not in trial.user_attrs
    claims.settle(again, "COMPLETE", "complete", value=0.9)
    assert study.best_trial.number == 1
    assert claim.number == 0


def test_it_goes_on_after_its_last_checkpoint(say: Say, claims: Claims, study: optuna.Study, database_url) -> None:
    failed(claims, epochs=5, checkpoint=2)
    assert "after epoch 3, its last checkpoint's" in say("retry", "s", "--trial", "0")
    assert study.trials[0].intermediate_values == {0: 0.0, 1: 0.1, 2: 0.2}
    assert rows(database_url, "SELECT epoch FROM hpsearch_checkpoints ORDER BY epoch") == [(1,), (2,)]


def test_from_start_forgets_all_that_it_reported(
    say: Say, claims: Claims, study: optuna.Study, storage: PostgresStorage, database_url: str
) -> None:
    claim = failed(claims, epochs=5, checkpoint=2)
    storage.get_all_trials(study._study_id)
    assert "from its beginning" in say("retry", "s", "--trial", "0", "--from-start")
    assert study.trials[0].intermediate_values == {}
    assert rows(database_url, "SELECT * FROM hpsearch_checkpoints") == []
    assert rows(database_url, "SELECT * FROM trial_values") == []
    assert claim.number == take(claims).number


def test_an_infeasible_trial_sheds_its_nan_its_value_and_its_mark(
    say: Say, claims: Claims, study: optuna.Study, storage: PostgresStorage
) -> None:
    claim = failed(claims, epochs=2, checkpoint=1, state="PRUNED")
    storage.get_all_trials(study._study_id)  # known as finished in this process
    say("retry", "s", "--trial", "0")
    trial = study.trials[0]
    assert (trial.state, trial.value, trial.intermediate_values) == (TrialState.WAITING, None, {0: 0.0, 1: 0.1})
    assert not {INFEASIBLE, REASON} & set(trial.user_attrs)
    assert claim.number == take(claims).number


def test_rungs_are_forgotten_with_the_epochs(
    say: Say, claims: Claims, study: optuna.Study, storage: PostgresStorage
) -> None:
    claim = take(claims)
    claims.report(claim, 1, 0.5)
    storage.set_trial_system_attr(claim.trial_id, rung_key(0), 0.5)
    storage.set_trial_system_attr(claim.trial_id, "fixed_params", {"x": 1})
    claims.settle(claim, "FAIL", "failed")
    say("retry", "s", "--trial", "0")
    assert study.trials[0].system_attrs == {"fixed_params": {"x": 1}}


def test_retries_are_counted_anew(say: Say, claims: Claims, database_url: str) -> None:
    for _ in range(2):
        take(claims)
        bury_workers(database_url)
    assert isinstance(claims.claim(), Lost), "one retry, and the second worker died too"
    say("retry", "s", "--trial", "0")
    take(claims)
    bury_workers(database_url)
    again = take(claims)
    assert (again.number, again.attempt) == (0, 4)
    outcomes = "SELECT attempt, outcome FROM hpsearch_attempts ORDER BY attempt"
    assert rows(database_url, outcomes) == [(1, "lost, retried"), (2, "lost, retried"), (3, "lost"), (4, None)]


def bury_workers(url: str) -> None:
    """Make the workers of live attempts ones of this machine that are gone."""
    machine, pid, _ = current_process().rsplit("/", 2)
    rows(url, f"UPDATE hpsearch_attempts SET process = '{machine}/{pid}/1' RETURNING 1")


def rows(url: str, statement: str) -> list[tuple[object, ...]]:
    connection = psycopg2.connect(url.replace("+psycopg2", ""))
    try:
        with connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall()
    finally:
        connection.close()


def test_a_trial_failed_from_outside_is_taken_from_the_worker_that_has_not_noticed(
    say: Say, claims: Claims, storage: PostgresStorage
) -> None:
    claim = take(claims)
    storage.set_trial_state_values(claim.trial_id, TrialState.FAIL)
    say("retry", "s", "--trial", "0")
    again = take(claims)
    assert (again.number, again.attempt) == (0, 2)
    assert not claims.renew(claim)
    assert claims.renew(again)


def test_several_are_retried_at_once(say: Say, claims: Claims, study: optuna.Study) -> None:
    failed(claims)
    failed(claims)
    say("retry", "s", "--trial", "0", "--trial", "1", "--trial", "0")
    assert [t.state for t in study.trials] == [TrialState.WAITING] * 2


def test_what_is_not_to_be_tried_again_is_refused(say: Say, claims: Claims, study: optuna.Study) -> None:
    claims.settle(take(claims), "COMPLETE", "complete", value=0.9)
    claims.settle(take(claims), "PRUNED", "pruned", value=0.1, attrs={REASON: "median pruner at epoch 2 of 5: ..."})
    running = take(claims)
    only = "only a failed or an infeasible trial is tried again"
    assert f"--trial 0: it is COMPLETE; {only}" in say("retry", "s", "--trial", "0", code=2)
    assert "it was pruned (median pruner at epoch 2 of 5: ...)" in say("retry", "s", "--trial", "1", code=2)
    assert "it is running" in say("retry", "s", "--trial", "2", code=2)
    claims.settle(running, "WAITING", "released")
    assert "it is waiting already" in say("retry", "s", "--trial", "2", code=2)
    assert "has no such trial; it has 0 to 2" in say("retry", "s", "--trial", "9", code=2)
    assert "--trial" in say("retry", "s", code=2)
    assert "-1" in say("retry", "s", "--trial", "-1", code=2)
    assert [t.state.name for t in study.trials] == ["COMPLETE", "PRUNED", "WAITING"]


def test_a_study_without_trials_says_so(handle: StudyHandle) -> None:
    with pytest.raises(SearchError, match="it has none yet"):
        retry_trial(handle, 0)


# Show


def test_a_trial_on_a_page(say: Say, claims: Claims, storage: PostgresStorage) -> None:
    first = take(claims)
    claims.report(first, 0, 0.25)
    claims.settle(first, "WAITING", "released")
    second = take(claims)
    storage.set_trial_param(second.trial_id, "width", 16, optuna.distributions.IntDistribution(8, 32))
    claims.report(second, 1, 0.25)
    storage.set_trial_system_attr(second.trial_id, rung_key(0), 0.25)
    claims.report(second, 2, 0.5)
    grounds = {"pruner": "successive_halving", "epoch": 2, "value": 0.5, "cutoff": 0.75, "peers": 4, "rung": 1}
    claims.settle(second, "PRUNED", "pruned", value=0.5, attrs={REASON: "it fell behind", PRUNING: grounds})
    page = say("show", "s", "--trial", "0")
    for line in (
        r"trial 0 of s: PRUNED",
        r" +reason +it fell behind",
        r" +pruning +successive_halving pruner, epoch 3, value 0.5, cutoff 0.75, peers 4, rung 1",
        r" +value +accuracy 0.5",
        r" +width +16",
        r" +1 +host:1 +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +\d{4}-\S+ \S+ +released",
        r" +2 +host:1 +\d{4}-\S+ \S+ +\d{4}-\S+ \S+ +pruned",
        r" +epoch +val accuracy +rung",
        r" +1 +0.25 *",
        r" +2 +0.25 +0",
        r" +3 +0.5 *",
    ):
        assert re.search(rf"^{line} *$", page, re.MULTILINE), f"{line}\n{page}"


def test_a_trial_that_runs_has_no_end_and_one_from_elsewhere_no_attempts(
    say: Say, claims: Claims, study: optuna.Study
) -> None:
    study.add_trial(create_trial(value=1.0))
    take(claims)
    assert re.search(r"1 +host:1 +\S+ \S+ +running", say("show", "s", "--trial", "1"))
    elsewhere = say("show", "s", "--trial", "0")
    for nothing in ("parameters: none", "attempts: none", "epochs: none"):
        assert nothing in elsewhere
    assert "--trial 7: study 's' has no such trial; it has 0 to 1" in say("show", "s", "--trial", "7", code=2)


def test_an_unknown_study_is_told(say: Say, study: optuna.Study, tmp_path: Path) -> None:
    for arguments in (["stop"], ["start"], ["extend", "--trials", "+1"], ["retry", "--trial", "0"]):
        verb, *options = arguments
        assert "no study 'nope'" in say(verb, "nope", *options, code=2)
