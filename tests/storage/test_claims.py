"""Claims: the budget is exact, a trial has one worker at a time, and no death loses one."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator

import optuna
import psycopg2
import pytest
from optuna.storages import BaseStorage
from optuna.trial import TrialState

from storage.claims import ATTEMPT, CRASHES, REASON, Claim, ClaimLostError, Claims, Lost, Nothing
from storage.locks import AdvisoryLocks
from storage.studies import open_storage


@pytest.fixture
def storage(database_url: str) -> BaseStorage:
    return open_storage(database_url, application_name="test")


@pytest.fixture
def study_id(storage: BaseStorage) -> int:
    return storage.create_new_study([optuna.study.StudyDirection.MAXIMIZE], "s")


Join = Callable[[], tuple[Claims, AdvisoryLocks]]


@pytest.fixture
def join(storage: BaseStorage, study_id: int, database_url: str) -> Iterator[Join]:
    """Another worker, with a connection of its own."""
    opened: list[AdvisoryLocks] = []

    def make() -> tuple[Claims, AdvisoryLocks]:
        locks = AdvisoryLocks(database_url, application_name=f"worker {len(opened)}")
        opened.append(locks)
        return Claims(storage, study_id, locks, worker=f"w{len(opened)}"), locks

    yield make
    for locks in opened:
        locks.close()


def take(claims: Claims, *, n_trials: int = 2, retries: int = 1) -> Claim:
    got = claims.claim(n_trials=n_trials, retries=retries)
    assert isinstance(got, Claim)
    return got


def states(storage: BaseStorage, study_id: int) -> list[str]:
    return [t.state.name for t in storage.get_all_trials(study_id)]


def test_the_budget_bounds_what_is_started(storage: BaseStorage, study_id: int, join: Join) -> None:
    one, two = join()[0], join()[0]
    assert [take(one).number, take(two).number] == [0, 1]
    third = join()[0]
    assert third.claim(n_trials=2, retries=1) == Nothing(running=2)
    assert states(storage, study_id) == ["RUNNING", "RUNNING"]


def test_a_spent_budget_leaves_nothing(storage: BaseStorage, study_id: int, join: Join) -> None:
    claims, _ = join()
    for _ in range(2):
        claim = take(claims)
        with claims.last_word(claim):
            storage.set_trial_state_values(claim.trial_id, TrialState.COMPLETE, [1.0])
    assert claims.claim(n_trials=2, retries=1) == Nothing(running=0)
    assert claims.claim(n_trials=3, retries=1, open_new=False) == Nothing(running=0)
    assert take(claims, n_trials=3).number == 2


def test_a_dead_workers_trial_is_taken_over_with_its_parameters(
    storage: BaseStorage, study_id: int, join: Join
) -> None:
    (dying, locks), (living, _) = join(), join()
    claim = take(dying, n_trials=1)
    study = optuna.load_study(study_name="s", storage=storage)
    value = optuna.trial.Trial(study, claim.trial_id).suggest_float("x", 0, 1)
    assert living.claim(n_trials=1, retries=1) == Nothing(running=1)
    locks.close()
    again = take(living, n_trials=1)
    assert (again.number, again.attempt, again.resumed, again.params) == (0, 2, True, {"x": value})
    assert storage.get_trial(again.trial_id).user_attrs[CRASHES] == 1


def test_a_trial_that_kills_its_workers_fails(storage: BaseStorage, study_id: int, join: Join) -> None:
    for _ in range(2):
        claims, locks = join()
        take(claims, n_trials=1)
        locks.close()
    claims, _ = join()
    lost = claims.claim(n_trials=1, retries=1)
    assert isinstance(lost, Lost)
    assert claims.claim(n_trials=1, retries=1) == Nothing(running=0)
    trial = storage.get_all_trials(study_id)[0]
    assert trial.state == TrialState.FAIL
    assert trial.user_attrs[REASON] == lost.reason
    assert "lost its worker, 2 in all" in lost.reason


def test_a_trial_given_back_is_the_next_to_be_taken(storage: BaseStorage, study_id: int, join: Join) -> None:
    claims, _ = join()
    claim = take(claims, n_trials=5)
    claims.give_back(claim)
    assert states(storage, study_id) == ["WAITING"]
    again = take(join()[0], n_trials=5)
    assert (again.number, again.attempt) == (0, 2)
    assert CRASHES not in storage.get_trial(again.trial_id).user_attrs


def test_given_back_counts_in_the_budget_and_enqueued_does_not_exceed_it(
    storage: BaseStorage, study_id: int, join: Join
) -> None:
    claims, _ = join()
    claims.give_back(take(claims, n_trials=1))
    study = optuna.load_study(study_name="s", storage=storage)
    study.enqueue_trial({"x": 0.5})
    assert take(claims, n_trials=1).number == 0
    assert join()[0].claim(n_trials=1, retries=1) == Nothing(running=1)
    enqueued = take(join()[0], n_trials=2)
    assert enqueued.number == 1
    assert optuna.trial.Trial(study, enqueued.trial_id).suggest_float("x", 0, 1) == 0.5


def test_a_notebooks_own_trial_is_left_alone(storage: BaseStorage, study_id: int, join: Join) -> None:
    optuna.load_study(study_name="s", storage=storage).ask()
    claims, _ = join()
    assert take(claims, n_trials=2).number == 1
    assert join()[0].claim(n_trials=2, retries=1) == Nothing(running=1)


def test_a_cut_connection_is_mended_unless_somebody_was_faster(
    storage: BaseStorage, study_id: int, join: Join, database_url: str
) -> None:
    (claims, locks), (other, _) = join(), join()
    claim = take(claims)
    cut(database_url, locks)
    claims.check(claim)
    assert other.claim(n_trials=1, retries=1) == Nothing(running=1), "the lock was not taken again"
    cut(database_url, locks)
    stolen = take(other, n_trials=1)
    assert stolen.trial_id == claim.trial_id
    with pytest.raises(ClaimLostError, match="taken over"):
        claims.check(claim)
    other.give_back(stolen)
    with pytest.raises(ClaimLostError, match="WAITING"):
        claims.check(claim)


def test_a_trial_ended_from_outside_is_lost(storage: BaseStorage, study_id: int, join: Join) -> None:
    claims, _ = join()
    claim = take(claims)
    storage.set_trial_state_values(claim.trial_id, TrialState.FAIL)
    with pytest.raises(ClaimLostError, match="FAIL from outside"), claims.last_word(claim):
        pytest.fail("it must not settle")


def cut(url: str, locks: AdvisoryLocks) -> None:
    """End the server's side of the connection, as a restart or a firewall would."""
    connection = psycopg2.connect(url.replace("+psycopg2", ""))
    with connection, connection.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s)", (locks.session(),))
    connection.close()


WORKER = """
import sys
from storage.claims import Claim, Claims
from storage.locks import AdvisoryLocks
from storage.studies import open_storage
from optuna.trial import TrialState
url, study_id = sys.argv[1], int(sys.argv[2])
storage = open_storage(url, application_name="w")
claims = Claims(storage, study_id, AdvisoryLocks(url, application_name="l"), worker="w")
print("ready", flush=True)
sys.stdin.readline()
while isinstance(claim := claims.claim(n_trials=20, retries=5), Claim):
    print(claim.number, claim.attempt, flush=True)
    with claims.last_word(claim):
        storage.set_trial_state_values(claim.trial_id, TrialState.COMPLETE, [1.0])
"""


def spawn(url: str, study_id: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WORKER, url, str(study_id)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_many_processes_one_of_them_killed_run_exactly_the_budget(
    storage: BaseStorage, study_id: int, database_url: str
) -> None:
    workers = [spawn(database_url, study_id) for _ in range(5)]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    assert workers[0].stdout is not None
    workers[0].stdout.readline()
    workers[0].kill()
    for worker in workers:
        worker.communicate()
    # The killed one may have been the last with a claim: the next worker finds what it left.
    finisher = spawn(database_url, study_id)
    finisher.communicate("go\n")
    trials = storage.get_all_trials(study_id)
    assert Counter(t.state for t in trials) == {TrialState.COMPLETE: 20}
    assert [t.number for t in trials] == list(range(20))
    assert all(t.user_attrs[ATTEMPT] <= 2 for t in trials)
