"""No worker runs a configuration twice while others are untried, and rejected suggestions leave no trace."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter

import optuna
import pytest
import sqlalchemy as sa
from optuna.trial import TrialState

from hpsearch.search.samplers.suggest import _UntriedSampler, make_sampler
from hpsearch.storage.database.locks import suggestion_lock
from hpsearch.storage.study_storage.storage import open_storage
from hpsearch.storage.trials.claim_results import Claim
from hpsearch.storage.trials.finishing import Outcome
from tests.search.sampling.support import Worker, branches, distinct, nine


@pytest.mark.parametrize("sampler", ["tpe", "random", "qmc"])
def test_all_nine_configurations_run_before_any_is_repeated(
    database_url: str, sampler: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    options = {"n_startup_trials": 3} if sampler == "tpe" else {}
    worker = Worker(database_url, sampler={"name": sampler, **options})
    configurations = [worker.run() for _ in range(9)]
    assert distinct(configurations) == 9
    assert "no untried configuration was found" not in caplog.text
    configurations += [worker.run() for _ in range(3)]
    assert distinct(configurations) == 9
    assert caplog.text.count("no untried configuration was found") == 3
    stored = [t.params for t in open_storage(database_url, application_name="look").get_all_trials(1)]
    assert stored == configurations, "a suggestion that was not taken left something behind"


def one(trial: optuna.Trial) -> None:
    trial.suggest_float("x", 0.0, 1.0)


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_a_worker_uses_all_trials_that_ended_since_it_started(database_url: str, sampler: str) -> None:
    """A worker that ran all trials suggests the same as a new one."""
    options = {"sampler": {"name": sampler, "n_startup_trials": 5}}

    def run(worker: Worker) -> float:
        claim = worker.claim()
        x = float(str(worker.suggest(claim)["x"]))
        worker.claims.finish_attempt(claim, Outcome.COMPLETE, value=-abs(x - 0.3))
        return x

    stays = Worker(database_url, one, name="stays", **options)
    found = [run(stays) for _ in range(10)]
    assert found == [run(Worker(database_url, one, name="joins", **options)) for _ in range(10)]
    assert found != [run(Worker(database_url, one, name="random", sampler={"name": "random"})) for _ in range(10)]


def test_tpe_ends_near_the_optimum(database_url: str) -> None:
    worker = Worker(database_url, one, sampler={"name": "tpe", "n_startup_trials": 5})
    tried = []
    for _ in range(30):
        claim = worker.claim()
        x = float(str(worker.suggest(claim)["x"]))
        worker.claims.finish_attempt(claim, Outcome.COMPLETE, value=-abs(x - 0.9))
        tried.append(abs(x - 0.9))
    assert max(tried[:5]) > 0.3
    assert sum(tried[-10:]) / 10 < 0.15


def test_configurations_of_unfinished_and_failed_trials_are_not_repeated(database_url: str) -> None:
    worker = Worker(database_url)
    states = ["RUNNING", "WAITING", "FAIL", "PRUNED", "COMPLETE", "RUNNING", "WAITING", "FAIL", "PRUNED"]
    ends = {
        "WAITING": Outcome.RELEASED, "FAIL": Outcome.FAILED, "PRUNED": Outcome.PRUNED, "COMPLETE": Outcome.COMPLETE
    }  # fmt: skip
    claims = [worker.claim() for _ in states]
    for claim, state in zip(claims, states, strict=True):
        worker.suggest(claim)
        if state != "RUNNING":
            worker.claims.finish_attempt(claim, ends[state], value=1.0 if state == "COMPLETE" else None)
    trials = worker.study.get_trials()
    assert Counter(t.state for t in trials) == Counter(TrialState[state] for state in states)
    assert distinct([t.params for t in trials]) == 9


def test_concurrent_suggestions_differ(database_url: str) -> None:
    workers = [Worker(database_url, sampler={"name": "random"}) for _ in range(3)]
    claims = [[worker.claim() for _ in range(3)] for worker in workers]
    start = threading.Barrier(3)
    made: list[dict[str, object]] = []

    def work(worker: Worker, mine: list[Claim]) -> None:
        start.wait()
        for claim in mine:
            made.append(worker.suggest(claim))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(workers, claims, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 9
    assert distinct(made) == 9


def first_suggestion(worker: Worker, number: int) -> optuna.Trial:
    """Return a trial of a new study with the sampler's first suggestion for the trial of that number."""
    sampler = make_sampler(worker.spec.sampler, study_seed=worker.spec.seed, trial_number=number, epochs=1)
    trial = optuna.create_study(sampler=sampler).ask()
    worker.objective.space(trial)
    return trial


def test_suggestions_see_concurrent_writes_of_other_workers(database_url: str) -> None:
    worker, other = (Worker(database_url, sampler={"name": "random"}) for _ in range(2))
    claim, others_claim = worker.claim(), other.claim()
    twin = first_suggestion(worker, claim.number)
    made: list[dict[str, object]] = []
    thread = threading.Thread(target=lambda: made.append(worker.suggest(claim)))
    with suggestion_lock(other.storage.engine, other.study._study_id) as take:
        assert take()
        thread.start()
        await_waiting_lock(other)
        for name, distribution in twin.distributions.items():
            value = distribution.to_internal_repr(twin.params[name])
            other.storage.set_trial_param(others_claim.trial_id, name, value, distribution)
    thread.join()
    assert made[0] != twin.params


def await_waiting_lock(worker: Worker) -> None:
    """Return when a process waits for an advisory lock in this database."""
    statement = sa.text(
        "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database "
        "WHERE locktype = 'advisory' AND NOT granted AND datname = current_database()"
    )
    with worker.storage.engine.connect() as connection:
        while not connection.execute(statement).scalar():
            time.sleep(0.005)


def test_a_frozen_worker_with_the_suggestion_lock_blocks_others_briefly(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(database_url)
    with suggestion_lock(worker.storage.engine, worker.study._study_id) as take:
        assert take()
        with suggestion_lock(worker.storage.engine, worker.study._study_id, wait_seconds=0.05) as take_too:
            assert not take_too()
        assert "could not acquire the lock that prevents duplicate suggestions" in caplog.text
        with suggestion_lock(worker.storage.engine, worker.study._study_id, wait_seconds=60.0) as take_too:
            assert take_too(), "the server releases the lock of an idle process"
    with suggestion_lock(worker.storage.engine, worker.study._study_id, wait_seconds=0.05) as take:
        assert take(), "the turn ends with its block"


def test_all_branches_of_a_conditional_space_are_run(database_url: str) -> None:
    worker = Worker(database_url, branches, sampler={"name": "random"})
    configurations = [worker.run() for _ in range(25)]
    assert distinct(configurations) == 25
    kinds = Counter(params["kind"] for params in configurations)
    assert (kinds["tree"], kinds["line"]) == (3, 2)


def test_untried_configurations_of_a_large_space_are_not_listed() -> None:
    trial = optuna.create_study(sampler=_UntriedSampler(1)).ask()
    assert 0 <= trial.suggest_int("n", 0, 10**12) <= 10**12
    assert 0 <= trial.suggest_float("x", 0, 1) <= 1
    assert trial.suggest_int("few", 1, 2) in {1, 2}


def test_a_continuous_space_needs_no_search_for_duplicates(database_url: str) -> None:
    calls = []

    def space(trial: optuna.Trial) -> None:
        calls.append(trial.suggest_float("x", 0, 1))

    worker = Worker(database_url, space, sampler={"name": "random"})
    assert [worker.run() for _ in range(3)] == [{"x": x} for x in calls]
    assert len(calls) == 3


def test_a_resumed_trial_keeps_its_parameters(database_url: str) -> None:
    worker = Worker(database_url)
    claim = worker.claim()
    params = worker.suggest(claim)
    worker.claims.finish_attempt(claim, Outcome.RELEASED)
    again = Worker(database_url)
    second = again.claim()
    assert (second.trial_id, second.attempt) == (claim.trial_id, 2)
    assert again.suggest(second) == params


def test_an_enqueued_configuration_runs_even_if_it_ran_before(database_url: str) -> None:
    worker = Worker(database_url)
    params = worker.run()
    worker.study.enqueue_trial(params)
    assert worker.run() == params
    worker.study.enqueue_trial({"optimizer": params["optimizer"]})
    half = worker.run()
    assert half["optimizer"] == params["optimizer"]
    assert half != params


def test_an_objective_that_raises_stores_no_parameter(database_url: str) -> None:
    def space(trial: optuna.Trial) -> None:
        nine(trial)
        raise RuntimeError("a bug")

    worker = Worker(database_url, space)
    with pytest.raises(RuntimeError, match="a bug"):
        worker.suggest(worker.claim())
    assert [t.params for t in worker.study.get_trials()] == [{}]


def test_start_up_points_depend_on_seed_and_number_and_differ(
    database_url: str,
) -> None:
    def space(trial: optuna.Trial) -> None:
        trial.suggest_float("x", 0, 1)

    worker, other = Worker(database_url, space), Worker(database_url, space)
    made = [worker.suggest(worker.claim()), other.suggest(other.claim()), worker.suggest(worker.claim())]
    expected = [first_suggestion(worker, number).params["x"] for number in range(3)]
    assert [params["x"] for params in made] == expected
    assert len(set(expected)) == 3
