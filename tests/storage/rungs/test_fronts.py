"""Rungs in multi-objective studies: trials are ranked by Pareto fronts, and none is pruned too early."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import sqlalchemy as sa
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import TrialState

from hpsearch.storage.attributes import RUNG
from hpsearch.storage.database.connect import make_engine
from hpsearch.storage.rungs.fronts import count_dominating, sort_by_front, to_losses
from hpsearch.storage.rungs.rungs import PrunedTrial, RungRank, Rungs, record_rung_value
from hpsearch.storage.trials.claim_results import Claim, NoTrialAvailable
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome
from hpsearch.storage.trials.reopening import reopen_trial, requeue_pruned_at_rungs
from tests.storage.trials.support import budget, rows, take

RUNGS = Rungs("asha", epochs=(1, 2), max_epochs=4, factor=2, maximize=True, maximize_each=(True, False))

Vector = list[float]  # accuracy (maximize) and latency (minimize)


@pytest.fixture
def study_id(storage: BaseStorage) -> int:
    study_id = storage.create_new_study([StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE], "s")
    budget(storage, study_id, n_trials=8)
    return study_id


@pytest.fixture
def claims(engine: sa.Engine, study_id: int) -> Claims:
    return Claims(engine, study_id, worker="w", retry_seconds=10.0, rungs=RUNGS)


def come(claims: Claims, claim: Claim, vector: Vector, rung: int = 0) -> RungRank:
    """Report an epoch and reach the rung after it."""
    claims.report(claim, RUNGS.epochs[rung] - 1, vector[0], metrics=vector)
    return claims.report_rung(claim, rung, vector)


def places(engine: sa.Engine, rung: int = 0) -> list[int]:
    """Return the trials of a rung in the order of promotion."""
    query = "SELECT number FROM hpsearch_rungs JOIN trials USING (trial_id) WHERE rung = :rung ORDER BY loss"
    return [row.number for row in rows(engine, query, rung=rung)]


def by_fronts(vectors: list[Vector]) -> list[int]:
    return sort_by_front(to_losses(vectors, RUNGS.maximize_each))


def promotions(engine: sa.Engine, rung: int) -> set[int]:
    query = """
        SELECT number FROM hpsearch_rungs JOIN trials USING (trial_id) WHERE rung = :rung AND promoted_at IS NOT NULL
    """
    return {row.number for row in rows(engine, query, rung=rung)}


def test_each_arrival_updates_all_ranks_of_the_rung(claims: Claims, engine: sa.Engine) -> None:
    vectors = [[0.5, 5.0], [0.9, 9.0], [0.4, 6.0], [0.6, 1.0], [0.95, 0.5], [0.2, 0.4]]
    held = [take(claims) for _ in vectors]
    for count, (claim, vector) in enumerate(zip(held, vectors, strict=True), 1):
        standing = come(claims, claim, vector)
        expected = by_fronts(vectors[:count])
        assert places(engine) == expected
        rank = expected.index(count - 1) + 1
        assert standing == RungRank(0, rank, count, is_promoted=rank <= count // 2)


def test_no_waiting_trial_dominates_a_promoted_one(claims: Claims, engine: sa.Engine) -> None:
    vectors = [[0.5, 5.0], [0.9, 9.0], [0.4, 6.0], [0.85, 9.5], [0.3, 1.0], [0.2, 2.0]]
    for claim, vector in zip([take(claims) for _ in vectors], vectors, strict=True):
        claims.report(claim, 0, vector[0], metrics=vector)
        claims.report_rung(claim, 0, vector)
    while isinstance(claim := claims.claim(), Claim) and claim.is_resumed:
        pass
    went_on = promotions(engine, 0)
    assert {0, 1, 4} == set(by_fronts(vectors)[:3]) <= went_on
    losses = to_losses(vectors, RUNGS.maximize_each)
    stayed = [number for number in range(len(vectors)) if number not in went_on]
    assert stayed
    for number in (0, 1, 4):
        assert not count_dominating(losses[[number, *stayed]])[0]


def test_the_earlier_of_equal_trials_is_promoted(claims: Claims) -> None:
    first, second = take(claims), take(claims)
    come(claims, second, [0.5, 5.0])
    assert come(claims, first, [0.5, 5.0]).is_promoted, "the trial with the lower number"


def test_no_trial_is_pruned_before_all_have_arrived(
    claims: Claims, storage: BaseStorage, study_id: int, engine: sa.Engine
) -> None:
    budget(storage, study_id, n_trials=4)  # two can be promoted at the rung: with one metric the third never would be
    held = [take(claims) for _ in range(4)]
    for claim, vector in zip(held[:3], ([0.9, 1.0], [0.8, 2.0], [0.7, 3.0]), strict=True):
        assert not come(claims, claim, vector).is_promoted
    goes_on = take(claims)
    assert goes_on.number == 0
    assert claims.claim() == NoTrialAvailable(running_trials=2), "the last may change any order"
    assert come(claims, held[3], [0.6, 0.5]).is_promoted, "no other dominates it"
    assert places(engine) == [0, 3, 1, 2]
    for claim in (goes_on, held[3]):
        assert isinstance(claims.claim(), NoTrialAvailable)
        claims.finish_attempt(claim, Outcome.COMPLETE, value=[0.9, 1.0])
    ended = [claims.claim() for _ in range(3)]
    assert [each.number for each in ended if isinstance(each, PrunedTrial)] == [2, 1]
    assert ended[2] == NoTrialAvailable(running_trials=0)


def test_the_reason_of_a_pruned_trial_has_its_rank_by_pareto_fronts(claims: Claims, storage: BaseStorage) -> None:
    goes_on = four(claims)
    for claim in goes_on:
        claims.finish_attempt(claim, Outcome.COMPLETE, value=_FOUR[claim.number])
    ended = [claims.claim(open_new=False) for _ in range(3)]
    assert [each.reason for each in ended if isinstance(each, PrunedTrial)] == [
        "asha pruner at epoch 1 of 4: rank 4 of 4 by Pareto fronts at rung 0, 2 promoted by earlier ranks",
        "asha pruner at epoch 1 of 4: rank 3 of 4 by Pareto fronts at rung 0, 2 promoted by earlier ranks",
    ]
    assert isinstance(ended[2], NoTrialAvailable)
    assert [storage.get_trial(claim.trial_id).values for claim in goes_on] == [_FOUR[1], _FOUR[3]]


_FOUR = [[0.5, 5.0], [0.9, 4.0], [0.4, 6.0], [0.6, 1.0]]  # 1 and 3 are the front


def four(claims: Claims) -> list[Claim]:
    """Let four trials reach the first rung; return those that are promoted at once, which are the Pareto front."""
    held = [take(claims) for _ in range(4)]
    at_once = [claim for claim, vector in zip(held, _FOUR, strict=True) if come(claims, claim, vector).is_promoted]
    assert [claim.number for claim in at_once] == [1, 3]
    return at_once


def test_trials_pruned_while_waiting_wait_again_in_a_larger_budget(
    claims: Claims, storage: BaseStorage, study_id: int, engine: sa.Engine
) -> None:
    budget(storage, study_id, n_trials=4)
    for claim in four(claims):
        claims.finish_attempt(claim, Outcome.COMPLETE, value=_FOUR[claim.number])
    assert [type(claims.claim()) for _ in range(3)] == [PrunedTrial, PrunedTrial, NoTrialAvailable]
    budget(storage, study_id, n_trials=6)
    with engine.begin() as connection:
        assert requeue_pruned_at_rungs(connection, study_id, RUNGS, n_trials=6) == 2
    waiting = storage.get_all_trials(study_id, states=(TrialState.WAITING,))
    assert [(trial.number, trial.values) for trial in waiting] == [(0, None), (2, None)]
    for claim, vector in zip([take(claims), take(claims)], ([0.1, 9.0], [0.2, 8.0]), strict=True):
        come(claims, claim, vector)
    again = take(claims)
    assert (again.number, promotions(engine, 0)) == (0, {0, 1, 3}), "the best three of six"


def test_a_trial_that_restarts_from_scratch_leaves_its_rung(claims: Claims, engine: sa.Engine, study_id: int) -> None:
    best = four(claims)[0]
    claims.finish_attempt(best, Outcome.FAILED)
    reopen_trial(engine, study_id, best.trial_id, from_start=True, rungs=RUNGS)
    assert places(engine) == [3, 0, 2]
    assert rows(engine, "SELECT loss FROM hpsearch_rungs ORDER BY loss") == [(0.0,), (1.0,), (2.0,)]
    assert rows(engine, "SELECT reached, best_loss FROM hpsearch_rung_cuts") == [(3, 0.0)]
    assert [take(claims).number for _ in range(2)] == [1, 4], "and no other trial is promoted instead"


def test_the_best_by_pareto_fronts_completes_if_too_few_trials_arrive(
    engine: sa.Engine, storage: BaseStorage, study_id: int
) -> None:
    budget(storage, study_id, n_trials=2)
    claims = Claims(engine, study_id, worker="w", retry_seconds=10.0, rungs=replace(RUNGS, factor=3))
    first, second = take(claims), take(claims)
    come(claims, first, [0.9, 9.0])
    assert isinstance(claims.claim(), NoTrialAvailable), "the other may yet be the complete one"
    come(claims, second, [0.95, 1.0])
    goes_on = take(claims)
    assert goes_on.number == 1
    assert not come(claims, goes_on, [0.95, 1.0], rung=1).is_promoted
    to_the_end = take(claims)
    assert (to_the_end.number, to_the_end.attempt) == (1, 3)
    claims.finish_attempt(to_the_end, Outcome.COMPLETE, value=[0.95, 1.0])
    retired = claims.claim()
    assert isinstance(retired, PrunedTrial)
    assert retired.number == 0
    assert retired.reason.endswith("rank 2 of 2 by Pareto fronts at rung 0, 1 promoted by earlier ranks")


def _vector(number: int) -> Vector:
    """Return the values of a trial, equal at each rung; some trials have the same values."""
    numbers = random.Random(number)
    return [round(numbers.random(), 1), round(numbers.random(), 1)]


def test_eight_concurrent_workers_promote_each_trial_once(
    storage: BaseStorage, engine: sa.Engine, study_id: int, database_url: str
) -> None:
    n_trials, rungs = 36, replace(RUNGS, factor=3, max_epochs=9, epochs=(1, 3))
    budget(storage, study_id, n_trials=n_trials)
    promoted: list[tuple[int, int]] = []

    def work(name: int) -> None:
        own = make_engine(database_url, application_name=f"w{name}")
        claims = Claims(own, study_id, worker=f"w{name}", rungs=rungs)
        while not isinstance(claim := claims.claim(), NoTrialAvailable):
            if isinstance(claim, PrunedTrial):
                continue
            assert isinstance(claim, Claim)
            rung, vector = 0, _vector(claim.number)
            if claim.is_resumed:
                waited = storage.get_trial(claim.trial_id).user_attrs[RUNG]["rung"]
                promoted.append((claim.number, waited))
                rung = waited + 1
            while rung < len(rungs.epochs):
                claims.report(claim, rungs.epochs[rung] - 1, vector[0], metrics=vector)
                if not claims.report_rung(claim, rung, vector).is_promoted:
                    break
                promoted.append((claim.number, rung))
                rung += 1
            else:
                claims.finish_attempt(claim, Outcome.COMPLETE, value=vector)
        own.dispose()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    work(8)  # trials that remained when the other workers found no work
    trials = storage.get_all_trials(study_id)
    assert [t.number for t in trials] == list(range(n_trials))
    assert {t.state for t in trials} == {TrialState.COMPLETE, TrialState.PRUNED}
    assert all(t.values == _vector(t.number) for t in trials)
    assert len(promoted) == len(set(promoted)), "a trial was promoted twice from a rung"
    reached = [places(engine, rung) for rung in range(2)]
    assert len(reached[0]) == n_trials
    for rung, found in enumerate(reached):
        went_on = promotions(engine, rung)
        assert {number for number, at in promoted if at == rung} == went_on
        assert set(found[: len(found) // 3]) <= went_on, "one of the best was left behind"
        numbers = sorted(found)
        assert found == [numbers[place] for place in by_fronts([_vector(number) for number in numbers])]
    assert set(reached[1]) == promotions(engine, 0)
    assert {t.number for t in trials if t.state == TrialState.COMPLETE} == promotions(engine, 1)
    assert rows(engine, "SELECT count(*) FROM hpsearch_attempts WHERE ended_at IS NULL") == [(0,)]


@pytest.mark.soak
def test_concurrent_arrivals_give_one_consistent_order(storage: BaseStorage, engine: sa.Engine, study_id: int) -> None:
    count, numbers = 500, np.random.default_rng(3)
    vectors = numbers.integers(0, 60, size=(count, 2)).astype(float).tolist()
    with engine.begin() as connection:
        made = "INSERT INTO trials (study_id, number, state) SELECT :s, n, 'RUNNING' FROM generate_series(0, 499) AS n"
        connection.execute(sa.text(made), {"s": study_id})
    ids = {trial.number: trial._trial_id for trial in storage.get_all_trials(study_id)}
    for number in numbers.permutation(count).tolist():
        with engine.begin() as connection:
            record_rung_value(connection, study_id, ids[number], RUNGS, rung=0, value=vectors[number], n_trials=count)
    found = places(engine)
    assert found == by_fronts(vectors)
    [(reached, best_loss, best_trial)] = rows(engine, "SELECT reached, best_loss, best_trial FROM hpsearch_rung_cuts")
    assert (reached, best_loss, best_trial) == (count, count // 2 - 1, ids[found[count // 2 - 1]])
    losses = [row.loss for row in rows(engine, "SELECT loss FROM hpsearch_rungs ORDER BY loss")]
    assert all(after - before == 1 for before, after in pairwise(losses))
