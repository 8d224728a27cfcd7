"""Claims: the budget is exact, a trial has one worker at a time, and no death loses one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from optuna.storages import BaseStorage
from optuna.trial import TrialState

from storage.claims import (
    ATTEMPT,
    REASON,
    SPEC,
    STOPPED,
    WORKER,
    Claim,
    ClaimLostError,
    Claims,
    Lost,
    Nothing,
    Stopped,
    running_now,
)
from storage.connect import make_engine
from storage.errors import StorageError
from storage.studies import open_storage


@pytest.fixture
def engine(database_url: str) -> Iterator[sa.Engine]:
    engine = make_engine(database_url, application_name="test")
    yield engine
    engine.dispose()


@pytest.fixture
def storage(database_url: str) -> BaseStorage:
    return open_storage(database_url, application_name="test storage")


@pytest.fixture
def study_id(storage: BaseStorage) -> int:
    study_id = storage.create_new_study([optuna.study.StudyDirection.MAXIMIZE], "s")
    budget(storage, study_id, n_trials=2)
    return study_id


def budget(storage: BaseStorage, study_id: int, **spec: Any) -> None:
    storage.set_study_user_attr(study_id, SPEC, {"retries": 1, **spec})


Join = Callable[..., Claims]


@pytest.fixture
def join(engine: sa.Engine, study_id: int) -> Join:
    """Another worker, in this process: it counts as alive until its lease ends."""

    def make(lease: float = 60.0) -> Claims:
        make.count += 1  # type: ignore[attr-defined]
        return Claims(engine, study_id, worker=f"w{make.count}", lease=lease, patience=10.0)  # type: ignore[attr-defined]

    make.count = 0  # type: ignore[attr-defined]
    return make


def take(claims: Claims) -> Claim:
    got = claims.claim()
    assert isinstance(got, Claim)
    return got


def states(storage: BaseStorage, study_id: int) -> list[str]:
    return [t.state.name for t in storage.get_all_trials(study_id)]


def rows(engine: sa.Engine, query: str, **parameters: object) -> list[Any]:
    with engine.connect() as connection:
        return list(connection.execute(sa.text(query), parameters))


def outcomes(engine: sa.Engine) -> list[tuple[int, str | None]]:
    query = "SELECT attempt, outcome FROM hpsearch_attempts ORDER BY trial_id, attempt"
    return [tuple(row) for row in rows(engine, query)]


def kill(engine: sa.Engine, claim: Claim) -> None:
    """Make the claim look like that of a worker of this machine that has ended."""
    child = subprocess.run([sys.executable, "-c", _NAME], capture_output=True, text=True, check=True)
    with engine.begin() as connection:
        statement = "UPDATE hpsearch_attempts SET process = :process WHERE trial_id = :trial AND ended_at IS NULL"
        connection.execute(sa.text(statement), {"process": child.stdout.strip(), "trial": claim.trial_id})


_NAME = "from storage.worker_process import current_process; print(current_process())"


def test_the_budget_bounds_what_is_started(storage: BaseStorage, study_id: int, join: Join) -> None:
    assert [take(join()).number, take(join()).number] == [0, 1]
    assert join().claim() == Nothing(running=2)
    assert states(storage, study_id) == ["RUNNING", "RUNNING"]


def test_a_new_trial_is_what_optuna_makes_of_one(storage: BaseStorage, study_id: int, join: Join) -> None:
    claim = take(join())
    trial = storage.get_trial(claim.trial_id)
    assert (trial.number, trial.state, trial.params, trial.intermediate_values) == (0, TrialState.RUNNING, {}, {})
    assert trial.datetime_start is not None
    assert abs(trial.datetime_start.timestamp() - time.time()) < 60
    assert trial.user_attrs == {ATTEMPT: 1, WORKER: "w1"}


def test_a_spent_budget_leaves_nothing_until_it_is_raised(storage: BaseStorage, study_id: int, join: Join) -> None:
    claims = join()
    for value in (0.5, 0.25):
        claims.settle(take(claims), "COMPLETE", "complete", value=value, attrs={REASON: "well done"})
    assert claims.claim() == Nothing(running=0)
    assert optuna.load_study(study_name="s", storage=storage).best_value == 0.5
    assert storage.get_all_trials(study_id)[0].user_attrs[REASON] == "well done"
    budget(storage, study_id, n_trials=3)
    assert claims.claim(open_new=False) == Nothing(running=0)
    assert take(claims).number == 2


def test_a_dead_workers_trial_is_taken_over_at_once_with_its_parameters(
    storage: BaseStorage, engine: sa.Engine, study_id: int, join: Join
) -> None:
    budget(storage, study_id, n_trials=1)
    dying, living = join(), join()
    claim = take(dying)
    study = optuna.load_study(study_name="s", storage=storage)
    value = optuna.trial.Trial(study, claim.trial_id).suggest_float("x", 0, 1)
    assert living.claim() == Nothing(running=1)
    kill(engine, claim)
    again = take(living)
    assert (again.trial_id, again.number, again.attempt, again.resumed) == (claim.trial_id, 0, 2, True)
    assert storage.get_trial(again.trial_id).params == {"x": value}
    assert outcomes(engine) == [(1, "lost"), (2, None)]


@pytest.fixture
def settled_server(postgres_server: Any, engine: sa.Engine) -> None:
    """A server that has been up for longer than the lease of a tenth of a second."""
    while not rows(engine, "SELECT pg_postmaster_start_time() < now() - interval '0.2 second' AS up")[0].up:
        time.sleep(0.02)


def expire(engine: sa.Engine) -> None:
    while not rows(engine, "SELECT bool_and(expires_at < now()) AS over FROM hpsearch_attempts")[0].over:
        time.sleep(0.02)


@pytest.mark.usefixtures("settled_server")
def test_a_frozen_worker_loses_its_trial_and_can_change_nothing(
    storage: BaseStorage, engine: sa.Engine, study_id: int, join: Join
) -> None:
    frozen, living = join(lease=0.1), join(lease=0.1)
    claim = take(frozen)
    frozen.report(claim, 0, 0.5)
    expire(engine)
    again = take(living)
    assert (again.trial_id, again.attempt) == (claim.trial_id, 2)
    for act in (
        lambda: frozen.report(claim, 1, 0.9),
        lambda: frozen.settle(claim, "COMPLETE", "complete", value=0.9),
        lambda: frozen.settle(claim, "WAITING", "released"),
    ):
        with pytest.raises(ClaimLostError, match=r"trial 0 was taken over by w2 \(attempt 2\)"):
            act()
    assert not frozen.renew(claim)
    frozen.let_go(claim)
    assert storage.get_trial(claim.trial_id).intermediate_values == {0: 0.5}
    assert living.renew(again)
    living.report(again, 1, 0.6)
    living.settle(again, "PRUNED", "pruned", value=0.6)
    trial = storage.get_trial(claim.trial_id)
    assert (trial.state, trial.value, trial.intermediate_values) == (TrialState.PRUNED, 0.6, {0: 0.5, 1: 0.6})
    assert outcomes(engine) == [(1, "lost"), (2, "pruned")]


@pytest.mark.usefixtures("settled_server")
def test_a_report_and_a_renewal_keep_a_lease(engine: sa.Engine, join: Join) -> None:
    holder = join(lease=0.1)
    claim = take(holder)
    expire(engine)
    assert holder.renew(claim), "an attempt that nobody took over is still live"
    later = join(lease=60.0)
    later.report(claim, 0, 0.5)
    expires = rows(engine, "SELECT expires_at > now() + interval '50 seconds' AS far FROM hpsearch_attempts")
    assert expires[0].far
    assert take(holder).number == 1


def test_leases_that_ended_while_the_server_was_down_are_given_time(engine: sa.Engine, join: Join) -> None:
    claim = take(join(lease=3600.0))  # longer than this server has been up
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE hpsearch_attempts SET expires_at = now() - interval '1 minute'"))
    other = join(lease=3600.0)
    assert take(other).number == 1
    assert other.claim() == Nothing(running=2)
    assert join(lease=0.1).claim() == Nothing(running=2), "it is not its own lease that counts"
    assert claim.attempt == 1


@pytest.mark.usefixtures("settled_server")
def test_after_an_outage_each_worker_has_the_time_of_its_lease_to_come_back(engine: sa.Engine, join: Join) -> None:
    take(join(lease=1.0))
    expire(engine)
    first_back = join()
    first_back.note_outage()
    assert take(first_back).number == 1, "the trial whose lease ended in the outage is left alone"
    while not isinstance(first_back.claim(), Claim):
        time.sleep(0.02)
    assert outcomes(engine)[0] == (1, "lost")


def test_a_trial_that_kills_its_workers_fails(
    storage: BaseStorage, engine: sa.Engine, study_id: int, join: Join
) -> None:
    budget(storage, study_id, n_trials=1)
    for _ in range(2):
        kill(engine, take(join()))
    join().sweep()  # leaves the last word to a claim, which ends the trial's run as well
    assert states(storage, study_id) == ["RUNNING"]
    lost = join().claim()
    assert isinstance(lost, Lost)
    assert join().claim() == Nothing(running=0)
    trial = storage.get_all_trials(study_id)[0]
    assert trial.state == TrialState.FAIL
    assert trial.datetime_complete is not None
    assert trial.user_attrs[REASON] == lost.reason
    assert lost.reason == "lost its worker w2; 2 attempts came to nothing"


def test_a_sweep_puts_back_what_a_dead_worker_left(
    storage: BaseStorage, engine: sa.Engine, study_id: int, join: Join
) -> None:
    kill(engine, take(join()))
    assert states(storage, study_id) == ["RUNNING"]
    join().sweep()
    assert states(storage, study_id) == ["WAITING"]
    assert outcomes(engine) == [(1, "lost")]


def test_a_trial_given_back_is_the_next_to_be_taken_and_costs_no_retry(
    storage: BaseStorage, engine: sa.Engine, study_id: int, join: Join
) -> None:
    claims = join()
    for attempt in range(1, 5):
        claim = take(claims)
        assert (claim.number, claim.attempt) == (0, attempt)
        claims.settle(claim, "WAITING", "released")
        assert states(storage, study_id) == ["WAITING"]
    assert {outcome for _, outcome in outcomes(engine)} == {"released"}


def test_given_back_counts_in_the_budget_and_enqueued_does_not_exceed_it(
    storage: BaseStorage, study_id: int, join: Join
) -> None:
    budget(storage, study_id, n_trials=1)
    claims = join()
    claims.settle(take(claims), "WAITING", "released")
    study = optuna.load_study(study_name="s", storage=storage)
    study.enqueue_trial({"x": 0.5})
    assert take(claims).number == 0
    assert join().claim() == Nothing(running=1)
    budget(storage, study_id, n_trials=2)
    enqueued = take(join())
    assert enqueued.number == 1
    assert optuna.trial.Trial(study, enqueued.trial_id).suggest_float("x", 0, 1) == 0.5


def test_a_notebooks_own_trial_is_left_alone(storage: BaseStorage, study_id: int, join: Join) -> None:
    optuna.load_study(study_name="s", storage=storage).ask()
    assert take(join()).number == 1
    assert join().claim() == Nothing(running=1)


def test_a_trial_ended_from_outside_is_lost(storage: BaseStorage, engine: sa.Engine, study_id: int, join: Join) -> None:
    claims = join()
    claim = take(claims)
    storage.set_trial_state_values(claim.trial_id, TrialState.FAIL)
    with pytest.raises(ClaimLostError, match="trial 0 was set to FAIL from outside"):
        claims.report(claim, 0, 0.5)
    with pytest.raises(ClaimLostError, match="trial 0 was set to FAIL from outside"):
        claims.settle(claim, "COMPLETE", "complete", value=0.5)
    claims.let_go(claim)
    assert outcomes(engine) == [(1, "cancelled")]
    other = take(claims)
    storage.set_trial_state_values(other.trial_id, TrialState.FAIL)
    kill(engine, other)
    assert claims.claim() == Nothing(running=0)
    assert outcomes(engine) == [(1, "cancelled"), (1, "cancelled")]


def test_a_stopped_study_hands_out_nothing_and_says_so_at_the_next_report(
    storage: BaseStorage, study_id: int, join: Join
) -> None:
    claims = join()
    claim = take(claims)
    assert claims.report(claim, 0, 0.5) is False
    storage.set_study_user_attr(study_id, STOPPED, "by ada at noon")
    assert claims.claim() == Stopped("by ada at noon")
    assert claims.report(claim, 1, 0.5) is True
    claims.settle(claim, "WAITING", "released")
    storage.set_study_user_attr(study_id, STOPPED, None)
    assert take(claims).number == 0


def test_a_deleted_study_ends_the_search(storage: BaseStorage, study_id: int, join: Join) -> None:
    claims = join()
    claim = take(claims)
    storage.delete_study(study_id)
    with pytest.raises(StorageError, match="deleted"):
        claims.claim()
    with pytest.raises(ClaimLostError, match="trial 0 was deleted"):
        claims.report(claim, 0, 0.5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e308])
def test_every_float_can_be_reported_once(storage: BaseStorage, study_id: int, join: Join, value: float) -> None:
    claims = join()
    claim = take(claims)
    claims.report(claim, 3, value)
    claims.report(claim, 3, 0.25)
    stored = storage.get_trial(claim.trial_id).intermediate_values
    assert list(stored) == [3]
    assert str(stored[3]) == str(value)


def test_an_infinite_value_settles_a_trial(storage: BaseStorage, study_id: int, join: Join) -> None:
    claims = join()
    for value in (float("inf"), float("-inf")):
        claim = take(claims)
        claims.settle(claim, "COMPLETE", "complete", value=value)
        assert storage.get_trial(claim.trial_id).value == value


@dataclass(frozen=True)
class File:
    path: str
    sha256: str = "0" * 64
    size: int = 1


def test_a_checkpoint_is_noted_with_its_epoch_and_two_are_kept(
    storage: BaseStorage, engine: sa.Engine, study_id: int, join: Join
) -> None:
    claims = join()
    claim = take(claims)
    query = "SELECT epoch, attempt, path FROM hpsearch_checkpoints ORDER BY epoch"
    for epoch in range(4):
        claims.report(claim, epoch, 0.5, File(f"{epoch}-1.pt") if epoch != 2 else None)
    assert [tuple(row) for row in rows(engine, query)] == [(1, 1, "1-1.pt"), (3, 1, "3-1.pt")]
    claims.settle(claim, "WAITING", "released")
    again = take(claims)
    claims.report(again, 3, 0.5, File("3-2.pt"))  # resumed from epoch 1, whose value is there already
    assert [tuple(row) for row in rows(engine, query)] == [(1, 1, "1-1.pt"), (3, 2, "3-2.pt")]
    with pytest.raises(ClaimLostError):
        claims.report(claim, 4, 0.5, File("4-1.pt"))
    assert len(rows(engine, query)) == 2


def test_what_the_server_did_but_could_not_say_is_not_done_again(
    storage: BaseStorage, engine: sa.Engine, study_id: int, join: Join
) -> None:
    claims = join()

    armed = ""

    def cut(connection: sa.Connection) -> None:
        nonlocal armed
        armed = ""
        driver = connection.connection.driver_connection
        assert driver is not None
        if not driver.autocommit:
            driver.commit()
        driver.close()  # the commit, or the reading of the reply, finds no connection

    def at_commit(connection: sa.Connection) -> None:
        if armed == "commit":
            cut(connection)

    def after_statement(connection: sa.Connection, *_: object) -> None:
        if armed == "statement":
            cut(connection)

    sa.event.listen(engine, "commit", at_commit)
    sa.event.listen(engine, "after_cursor_execute", after_statement)
    armed = "commit"
    claim = take(claims)
    assert (claim.number, claim.attempt, armed) == (0, 1, "")
    armed = "statement"
    claims.report(claim, 0, 0.5)
    assert not armed
    armed = "statement"
    claims.settle(claim, "COMPLETE", "complete", value=0.5)
    assert not armed
    assert states(storage, study_id) == ["COMPLETE"]
    assert outcomes(engine) == [(1, "complete")]


def test_who_runs_now(engine: sa.Engine, study_id: int, join: Join) -> None:
    claims = join()
    first = take(claims)
    take(claims)
    assert running_now(engine, study_id) == 2
    kill(engine, first)
    assert running_now(engine, study_id) == 1


WORKER_PROGRAM = """
import sys
from storage.claims import Claim, Claims
from storage.connect import make_engine
claims = Claims(make_engine(sys.argv[1], application_name="w"), int(sys.argv[2]), worker="w")
print("ready", flush=True)
sys.stdin.readline()
while isinstance(claim := claims.claim(), Claim):
    print(claim.number, claim.attempt, flush=True)
    claims.settle(claim, "COMPLETE", "complete", value=1.0)
"""


def spawn(url: str, study_id: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WORKER_PROGRAM, url, str(study_id)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_many_processes_one_of_them_killed_run_exactly_the_budget(
    storage: BaseStorage, engine: sa.Engine, study_id: int, database_url: str
) -> None:
    budget(storage, study_id, n_trials=200, retries=5)
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
    assert Counter(t.state for t in trials) == {TrialState.COMPLETE: 200}
    assert [t.number for t in trials] == list(range(200))
    assert workers[0].returncode == -signal.SIGKILL
    assert all(attempt <= 2 for attempt, _ in outcomes(engine))
    overlapping = """
        SELECT count(*) FROM hpsearch_attempts a JOIN hpsearch_attempts b USING (trial_id)
         WHERE a.attempt < b.attempt AND a.ended_at > b.started_at
    """
    assert rows(engine, overlapping)[0][0] == 0


EIGHT_PROGRAM = """
import sys
from storage.claims import Claim, Claims
from storage.connect import make_engine
engine = make_engine(sys.argv[1], application_name="w")
print("ready", flush=True)
for line in sys.stdin:
    claims, done = Claims(engine, int(line), worker="w"), 0
    while isinstance(claim := claims.claim(), Claim):
        claims.settle(claim, "COMPLETE", "complete", value=1.0)
        done += 1
    print(done, flush=True)
"""


def test_eight_workers_run_exactly_the_budget_fifty_times_in_a_row(storage: BaseStorage, database_url: str) -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", EIGHT_PROGRAM, database_url]
    workers = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(8)]

    def replies() -> list[str]:
        return [worker.stdout.readline().strip() for worker in workers if worker.stdout]

    def search(study_id: int) -> int:
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write(f"{study_id}\n")
            worker.stdin.flush()
        return sum(map(int, replies()))

    assert replies() == ["ready"] * 8
    for time_ in range(50):
        study_id = storage.create_new_study([optuna.study.StudyDirection.MAXIMIZE], f"s{time_}")
        budget(storage, study_id, n_trials=20)
        assert search(study_id) == 20
        assert search(study_id) == 0, "started again"
        trials = storage.get_all_trials(study_id)
        assert [(t.number, t.state) for t in trials] == [(n, TrialState.COMPLETE) for n in range(20)]
    for worker in workers:
        worker.communicate()


def test_the_spec_is_read_as_optuna_wrote_it(storage: BaseStorage, engine: sa.Engine, study_id: int) -> None:
    query = "SELECT value_json FROM study_user_attributes WHERE key = :key"
    assert json.loads(rows(engine, query, key=SPEC)[0].value_json) == {"n_trials": 2, "retries": 1}
