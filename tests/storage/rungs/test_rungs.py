"""Trials wait at rungs, and the best are promoted: once per rung, on any free worker, decided from the rows only."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import sqlalchemy as sa
from optuna.storages import BaseStorage
from optuna.trial import TrialState

from hpsearch.storage.attributes import PRUNING, REASON, RUNG, STOPPED
from hpsearch.storage.backup.adapt import release_trials
from hpsearch.storage.errors import ClaimLostError
from hpsearch.storage.rungs.rungs import PrunedTrial, Rungs
from hpsearch.storage.trials.budget import UNBOUNDED_TRIALS, create_spending
from hpsearch.storage.trials.claim_results import Claim, NoTrialAvailable, StudyStopped
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome
from hpsearch.storage.trials.reopening import reopen_trial, requeue_pruned_at_rungs
from tests.storage.trials.support import begin_at_once, budget, kill, outcomes, rows, take

RUNGS = Rungs("asha", epochs=(1, 2), max_epochs=4, factor=2, maximize=True)

Asha = Callable[[], Claims]


@pytest.fixture
def asha(engine: sa.Engine, study_id: int) -> Asha:
    return lambda: Claims(engine, study_id, worker="w", retry_seconds=10.0, rungs=RUNGS)


def pause(claims: Claims, value: float, rung: int = 0) -> Claim:
    """Claim a trial and pause it at a rung."""
    claim = take(claims)
    assert not claims.report_rung(claim, rung, value).is_promoted
    return claim


def promotions(engine: sa.Engine) -> list[tuple[int, int]]:
    """Return trial and rung of all promotions, in their order."""
    query = """
        SELECT number, rung FROM hpsearch_rungs JOIN trials USING (trial_id) WHERE promoted_at IS NOT NULL
         ORDER BY promoted_at
    """
    return [tuple(row) for row in rows(engine, query)]


def test_promotions_precede_new_trials_and_the_whole_budget_is_started(
    asha: Asha, storage: BaseStorage, study_id: int
) -> None:
    budget(storage, study_id, n_trials=4)
    claims = asha()
    pause(claims, 0.1)
    second = take(claims)
    standing = claims.report_rung(second, 0, 0.9)
    assert (standing.rank, standing.reached_count, standing.is_promoted) == (1, 2, True)  # it never waits
    claims.finish_attempt(second, Outcome.COMPLETE, value=0.9)
    assert [take(claims).number for _ in range(2)] == [2, 3]  # trial 0 is not the best


def test_a_waiting_trial_is_promoted_when_the_rung_has_enough_trials(
    asha: Asha, storage: BaseStorage, study_id: int, engine: sa.Engine
) -> None:
    budget(storage, study_id, n_trials=8)
    claims = asha()
    pause(claims, 0.9)
    pause(claims, 0.1)
    again = take(claims)  # one of two
    assert (again.number, again.attempt) == (0, 2)
    assert promotions(engine) == [(0, 0)]
    assert outcomes(engine) == [(1, "paused"), (2, None), (1, "paused")]
    assert storage.get_trial(again.trial_id).user_attrs[RUNG] == {"rung": 0, "epoch": 0, "rank": 1, "reached": 1}


def test_trials_that_ran_at_a_backup_are_claimed_after_the_restore(
    asha: Asha, storage: BaseStorage, study_id: int, engine: sa.Engine
) -> None:
    budget(storage, study_id, n_trials=8)
    claims = asha()
    pause(claims, 0.9)
    pause(claims, 0.1)
    running = [take(claims), take(claims)]
    assert [(claim.number, claim.attempt) for claim in running] == [(0, 2), (2, 1)]  # one promoted, one new
    with engine.begin() as connection:
        release_trials(connection.connection.cursor())
    assert {(claim.number, claim.attempt) for claim in (take(claims), take(claims))} == {(0, 3), (2, 2)}


def test_promotions_start_with_the_highest_rung(asha: Asha, storage: BaseStorage, study_id: int) -> None:
    budget(storage, study_id, n_trials=16)
    claims = asha()
    held = [take(claims) for _ in range(6)]
    values = (0.1, 0.9, 0.95, 0.6, 0.7, 0.05)
    first = [claims.report_rung(claim, 0, value).is_promoted for claim, value in zip(held, values, strict=True)]
    assert first == [False, True, True, False, False, False]
    assert [claims.report_rung(held[n], 1, value).is_promoted for n, value in ((1, 0.9), (2, 0.8))] == [False, False]
    assert [take(claims).number for _ in range(2)] == [1, 4]


def test_a_minimized_metric_promotes_the_lowest_values(storage: BaseStorage, study_id: int, engine: sa.Engine) -> None:
    budget(storage, study_id, n_trials=8)
    claims = Claims(engine, study_id, worker="w", rungs=Rungs("asha", (1,), 4, 2, maximize=False))
    pause(claims, 0.9)
    assert claims.report_rung(take(claims), 0, 0.1).is_promoted


def test_the_earlier_of_equal_values_is_better(asha: Asha, storage: BaseStorage, study_id: int) -> None:
    budget(storage, study_id, n_trials=8)
    claims = asha()
    pause(claims, 0.5)
    pause(claims, 0.5)
    assert take(claims).number == 0


def test_a_trial_without_any_chance_of_promotion_is_pruned_as_soon_as_min_complete_trials_are_complete(
    asha: Asha, storage: BaseStorage, study_id: int
) -> None:
    budget(storage, study_id, n_trials=4)  # 2 of them are promoted at rung 0, and 1 at rung 1
    claims = asha()
    held = [take(claims) for _ in range(3)]
    for claim, value in zip(held, (0.3, 0.2, 0.1), strict=True):
        storage.set_trial_intermediate_value(claim.trial_id, 0, value)
        claims.report_rung(claim, 0, value)
    promoted = take(claims)
    assert promoted.number == 0
    assert take(claims).number == 3, "trial 2 is kept, because the better trials may fail"
    claims.finish_attempt(promoted, Outcome.COMPLETE, value=0.3)
    retired = claims.claim()
    assert isinstance(retired, PrunedTrial)
    assert retired.number == 2
    assert retired.reason == "asha pruner at epoch 1 of 4: rank 3 of 3 at rung 0, 2 of 4 trials are promoted"
    trial = storage.get_trial(retired.trial_id)
    assert (trial.state, trial.value, trial.user_attrs[REASON]) == (TrialState.PRUNED, 0.1, retired.reason)
    assert trial.user_attrs[PRUNING] == {
        "pruner": "asha", "epoch": 0, "value": 0.1, "cutoff": 0.2, "peers": 2, "rung": 0
    }  # fmt: skip


def test_waiting_trials_are_pruned_when_no_running_trial_can_change_the_rank(
    asha: Asha, storage: BaseStorage, study_id: int
) -> None:
    budget(storage, study_id, n_trials=2)
    claims = asha()
    runs = take(claims)
    pause(claims, 0.5)
    assert claims.claim() == NoTrialAvailable(running_trials=1)
    assert claims.has_trials_left()
    claims.finish_attempt(runs, Outcome.COMPLETE, value=0.4)  # before it writes that it reached the rung
    retired = claims.claim()
    assert isinstance(retired, PrunedTrial)
    assert retired.reason == "asha pruner at epoch 1 of 4: rank 1 of 1 at rung 0, none promoted"
    assert claims.claim() == NoTrialAvailable(running_trials=0)
    assert not claims.has_trials_left()


def test_the_best_trial_completes_if_too_few_trials_arrive(
    storage: BaseStorage, study_id: int, engine: sa.Engine
) -> None:
    budget(storage, study_id, n_trials=6)
    claims = Claims(engine, study_id, worker="w", retry_seconds=10.0, rungs=replace(RUNGS, factor=3))
    held = [take(claims) for _ in range(6)]
    for claim in held:
        claims.report_rung(claim, 0, 1 / (1 + claim.number))
    for number in (0, 1):  # a third of two trials is none
        claim = take(claims)
        assert claim.number == number
        assert not claims.report_rung(claim, 1, 2 / (1 + number)).is_promoted
    best = take(claims)
    assert (best.number, best.attempt) == (0, 3)
    assert claims.claim() == NoTrialAvailable(running_trials=1)
    claims.finish_attempt(best, Outcome.FAILED)
    other = take(claims)  # at least one trial has to complete
    assert (other.number, other.attempt) == (1, 3)
    claims.finish_attempt(other, Outcome.INFEASIBLE)
    last = take(claims)  # it was never among the best third
    assert (last.number, last.attempt) == (2, 2)
    claims.finish_attempt(last, Outcome.COMPLETE, value=1.0)
    retired = [claims.claim() for _ in range(3)]
    assert {each.number for each in retired if isinstance(each, PrunedTrial)} == {3, 4, 5}
    assert claims.claim() == NoTrialAvailable(running_trials=0)
    assert promotions(engine) == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0)]


def test_min_complete_trials_complete_if_too_few_trials_arrive(
    storage: BaseStorage, study_id: int, engine: sa.Engine
) -> None:
    budget(storage, study_id, n_trials=6)
    claims = Claims(engine, study_id, worker="w", retry_seconds=10.0, rungs=replace(RUNGS, factor=3, min_complete=3))
    for number, claim in enumerate([take(claims) for _ in range(6)]):
        claims.report_rung(claim, 0, 1 / (1 + number))
    held = [take(claims) for _ in range(2)]  # the best third of six
    held.append(take(claims))  # at once, because two complete trials are too few
    assert [claim.number for claim in held] == [0, 1, 2]
    assert claims.claim() == NoTrialAvailable(running_trials=3)
    for claim in held:
        claims.report_rung(claim, 1, 1 / (1 + claim.number))
    last = []
    for _ in range(3):
        last.append(take(claims))
        claims.finish_attempt(last[-1], Outcome.COMPLETE, value=1.0)
    assert [claim.number for claim in last] == [0, 1, 2]
    ended = [claims.claim() for _ in range(4)]
    assert [type(each) for each in ended] == [PrunedTrial, PrunedTrial, PrunedTrial, NoTrialAvailable]
    assert isinstance(ended[0], PrunedTrial)
    assert "ranks 1 to 3 are promoted" in ended[0].reason


def test_the_rest_of_a_budget_in_epochs_completes_min_complete_trials(
    storage: BaseStorage, study_id: int, engine: sa.Engine
) -> None:
    budget(storage, study_id, n_trials=UNBOUNDED_TRIALS)
    rungs = replace(RUNGS, factor=10, min_complete=2)
    claims = Claims(engine, study_id, worker="w", retry_seconds=10.0, rungs=rungs, metered_epochs=rungs.max_epochs)
    with engine.begin() as connection:
        create_spending(connection, study_id, epochs=10, seconds=None)
    last = dict[int, int]()
    order = []
    while isinstance(claim := claims.claim(), Claim):
        order.append(claim.number)
        for epoch in range(last.get(claim.number, -1) + 1, rungs.max_epochs):
            claims.report(claim, epoch, value := -float(claim.number))
            last[claim.number] = epoch
            if epoch == rungs.max_epochs - 1:
                claims.finish_attempt(claim, Outcome.COMPLETE, value=value)
            elif (
                epoch + 1 in rungs.epochs
                and not claims.report_rung(claim, rungs.epochs.index(epoch + 1), value).is_promoted
            ):
                break
    # Two complete trials need 6 epochs after the first rung, so 4 trials are started with the first 4 epochs.
    assert order == [0, 1, 2, 3, 0, 0, 1, 1]
    assert [t.number for t in storage.get_all_trials(study_id) if t.state == TrialState.COMPLETE] == [0, 1]


@pytest.mark.parametrize(("workers", "epochs"), [(1, 24), (4, 24), (8, 40), (16, 60), (4, 8), (8, 4), (4, 7)])
def test_several_workers_complete_trials_with_the_rest_of_a_budget(
    storage: BaseStorage, study_id: int, engine: sa.Engine, workers: int, epochs: int
) -> None:
    budget(storage, study_id, n_trials=UNBOUNDED_TRIALS)
    rungs = replace(RUNGS, factor=10, min_complete=2)
    arguments = {"retry_seconds": 10.0, "rungs": rungs, "metered_epochs": rungs.max_epochs}
    fleet = [Claims(engine, study_id, worker=f"w:{number}", **arguments) for number in range(workers)]
    with engine.begin() as connection:
        create_spending(connection, study_id, epochs=epochs, seconds=None)
    running = dict[int, Claim]()
    last = dict[int, int]()
    while True:
        for place, claims in enumerate(fleet):  # each worker trains an epoch, so that all of them train at once
            while place not in running and not isinstance(claim := claims.claim(), NoTrialAvailable):
                if not isinstance(claim, Claim):
                    continue  # a pruned trial
                running[place] = claim
                reached = last.get(claim.number, -1) + 1
                if reached in rungs.epochs:  # as a worker does when it resumes
                    assert claims.report_rung(claim, rungs.epochs.index(reached), -float(claim.number)).is_promoted
        if not running:
            break
        for place, claim in list(running.items()):
            epoch = last.get(claim.number, -1) + 1
            report = fleet[place].report(claim, epoch, value := -float(claim.number))
            last[claim.number] = epoch if report.is_counted else epoch - 1
            if epoch == rungs.max_epochs - 1 and report.is_counted:
                fleet[place].finish_attempt(claim, Outcome.COMPLETE, value=value)
                del running[place]
            elif report.is_counted and epoch + 1 in rungs.epochs:
                if not fleet[place].report_rung(claim, rungs.epochs.index(epoch + 1), value).is_promoted:
                    del running[place]
            elif not report.has_budget:
                fleet[place].finish_attempt(claim, Outcome.RELEASED, retry=True)
                del running[place]
    trials = storage.get_all_trials(study_id)
    complete = [t.number for t in trials if t.state == TrialState.COMPLETE]
    assert {t.state for t in trials} <= {TrialState.COMPLETE, TrialState.PRUNED}
    assert len(complete) >= min(rungs.min_complete, epochs // rungs.max_epochs)
    assert sum(len(t.intermediate_values) for t in trials) == epochs


def test_no_promotion_after_the_time_budget_is_spent(asha: Asha, storage: BaseStorage, study_id: int) -> None:
    budget(storage, study_id, n_trials=8)
    claims = asha()
    pause(claims, 0.5)
    pause(claims, 0.4)
    ended = [claims.claim(open_new=False) for _ in range(3)]
    assert [type(each) for each in ended] == [PrunedTrial, PrunedTrial, NoTrialAvailable]
    reasons = [each.reason for each in ended if isinstance(each, PrunedTrial)]
    assert reasons[0].endswith("rank 2 of 2 at rung 0, rank 1 is promoted")
    assert reasons[1].endswith("rank 1 of 2 at rung 0, timeout reached")


def test_a_stopped_study_keeps_waiting_trials(asha: Asha, storage: BaseStorage, study_id: int) -> None:
    budget(storage, study_id, n_trials=2)
    claims = asha()
    for value in (0.5, 0.4):
        pause(claims, value)
    storage.set_study_user_attr(study_id, STOPPED, "by ann")
    assert claims.claim() == StudyStopped("by ann")
    storage.set_study_user_attr(study_id, STOPPED, None)
    assert take(claims).number == 0


def test_a_promoted_trial_without_worker_is_next_and_not_promoted_again(
    asha: Asha, storage: BaseStorage, study_id: int, engine: sa.Engine
) -> None:
    budget(storage, study_id, n_trials=8)
    claims = asha()
    pause(claims, 0.9)
    pause(claims, 0.1)
    kill(engine, take(claims))
    again = take(asha())
    assert (again.number, again.attempt) == (0, 3)
    assert claims.report_rung(again, 0, 0.9).is_promoted  # it reports the rung again from which it was promoted
    assert promotions(engine) == [(0, 0)]


def test_a_worker_that_lost_its_trial_writes_no_rung(
    asha: Asha, storage: BaseStorage, study_id: int, engine: sa.Engine
) -> None:
    budget(storage, study_id, n_trials=8)
    frozen, other = asha(), asha()
    claim = take(frozen)
    kill(engine, claim)
    take(other)
    with pytest.raises(ClaimLostError, match="was taken over by w"):
        frozen.report_rung(claim, 0, 0.9)
    assert rows(engine, "SELECT * FROM hpsearch_rungs") == []


def test_a_pause_with_a_lost_reply_stays_a_pause_after_a_promotion(
    asha: Asha, storage: BaseStorage, study_id: int, engine: sa.Engine
) -> None:
    budget(storage, study_id, n_trials=8)
    claims, other = asha(), asha()
    claim, next_one = take(claims), take(other)
    cut = False

    def at_commit(connection: sa.Connection) -> None:
        nonlocal cut
        if cut:
            return
        cut = True
        driver = connection.connection.driver_connection
        assert driver is not None
        driver.commit()
        driver.close()
        other.report_rung(next_one, 0, 0.1)
        assert take(other).number == 0

    sa.event.listen(engine, "commit", at_commit)
    assert not claims.report_rung(claim, 0, 0.9).is_promoted
    sa.event.remove(engine, "commit", at_commit)
    assert cut
    assert promotions(engine) == [(0, 0)]
    assert outcomes(engine) == [(1, "paused"), (2, None), (1, "paused")]


def test_externally_ended_trials_block_no_promotion(asha: Asha, storage: BaseStorage, study_id: int) -> None:
    budget(storage, study_id, n_trials=8)
    claims = asha()
    best = pause(claims, 0.9)
    storage.set_trial_state_values(best.trial_id, TrialState.FAIL)
    for value in (0.2, 0.3, 0.1):
        pause(claims, value)
    assert take(claims).number == 2


def test_a_failed_trial_that_restarts_from_scratch_leaves_its_rungs(
    asha: Asha, storage: BaseStorage, study_id: int, engine: sa.Engine
) -> None:
    budget(storage, study_id, n_trials=8)
    claims = asha()
    pause(claims, 0.1)
    best = take(claims)
    assert claims.report_rung(best, 0, 0.9).is_promoted
    claims.finish_attempt(best, Outcome.FAILED)
    reopen_trial(engine, study_id, best.trial_id, from_start=True, rungs=RUNGS)
    assert rows(engine, "SELECT number FROM hpsearch_rungs JOIN trials USING (trial_id)") == [(0,)]
    assert take(claims).number == 1


def test_a_larger_budget_lets_promotable_pruned_trials_wait_again(
    asha: Asha, storage: BaseStorage, study_id: int, engine: sa.Engine
) -> None:
    budget(storage, study_id, n_trials=4)
    claims = asha()
    held = [take(claims) for _ in range(4)]
    for claim, value in zip(held, (0.1, 0.4, 0.3, 0.2), strict=True):
        storage.set_trial_intermediate_value(claim.trial_id, 0, value)
        if claims.report_rung(claim, 0, value).is_promoted:
            claims.finish_attempt(claim, Outcome.COMPLETE, value=value)
    claims.finish_attempt(take(claims), Outcome.COMPLETE, value=0.3)
    assert [type(claims.claim()) for _ in range(3)] == [PrunedTrial, PrunedTrial, NoTrialAvailable]
    pruned = (TrialState.PRUNED,)
    assert [trial.number for trial in storage.get_all_trials(study_id, states=pruned)] == [0, 3]
    budget(storage, study_id, n_trials=6)  # three trials can be promoted
    with engine.begin() as connection:
        assert requeue_pruned_at_rungs(connection, study_id, RUNGS, n_trials=6) == 1
    assert [trial.number for trial in storage.get_all_trials(study_id, states=pruned)] == [0]
    waits = storage.get_trial(held[3].trial_id)
    assert (waits.state, waits.value) == (TrialState.WAITING, None)
    assert waits.intermediate_values == {0: 0.2}
    assert REASON not in waits.user_attrs
    for claim, value in zip([take(claims), take(claims)], (0.15, 0.12), strict=True):
        claims.report_rung(claim, 0, value)
    assert take(claims).number == 3


WORKER_PROGRAM = """
import sys, random
from hpsearch.storage.database.connect import make_engine
from hpsearch.storage.rungs.rungs import PrunedTrial
from hpsearch.storage.trials.claim_results import Claim
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome
from hpsearch.storage.rungs.rungs import Rungs
rungs = Rungs("asha", (1, 3, 9), 27, 3, maximize=False)
claims = Claims(make_engine(sys.argv[1], application_name="w"), int(sys.argv[2]), worker="w", rungs=rungs)
print("ready", flush=True)
sys.stdin.readline()
while isinstance(claim := claims.claim(), (Claim, PrunedTrial)):
    if isinstance(claim, PrunedTrial):
        continue
    value = random.Random(claim.number).random()
    rung = claim.attempt - 1  # a trial that never waited is seen at the next
    while rung < 3 and claims.report_rung(claim, rung, value).is_promoted:
        rung += 1
    if rung == 3:
        claims.finish_attempt(claim, Outcome.COMPLETE, value=value)
"""


@pytest.mark.soak
def test_many_processes_promote_each_trial_once_from_the_best(
    storage: BaseStorage, engine: sa.Engine, study_id: int, database_url: str
) -> None:
    budget(storage, study_id, n_trials=81)
    command = [sys.executable, "-c", WORKER_PROGRAM, database_url, str(study_id)]
    workers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    begin_at_once(workers)
    for worker in workers:
        worker.communicate()
        assert worker.returncode == 0
    trials = storage.get_all_trials(study_id)
    assert [t.number for t in trials] == list(range(81))
    assert {t.state for t in trials} == {TrialState.COMPLETE, TrialState.PRUNED}
    reached = [rows(engine, "SELECT loss, promoted_at FROM hpsearch_rungs WHERE rung = :r", r=r) for r in range(3)]
    assert len(reached[0]) == 81
    for rung, found in enumerate(reached):
        promoted = [row.loss for row in found if row.promoted_at is not None]
        best = sorted(row.loss for row in found)[: len(found) // 3]
        assert set(best) <= set(promoted), f"a trial of the best third of rung {rung} was not promoted"
        if rung < 2:
            assert len(reached[rung + 1]) == len(promoted)
    live = "SELECT count(*) FROM hpsearch_attempts WHERE ended_at IS NULL"
    assert rows(engine, live) == [(0,)]
