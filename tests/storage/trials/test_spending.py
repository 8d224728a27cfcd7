"""Budgets in epochs and in seconds are exact, also when workers report at the same moment or die."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
import sqlalchemy as sa
from optuna.storages import BaseStorage
from optuna.trial import TrialState

from hpsearch.search.spec.spec import MAX_TRIALS
from hpsearch.storage.attributes import BUDGET_CUT, REASON, SPEC
from hpsearch.storage.rungs.rungs import PrunedTrial, Rungs
from hpsearch.storage.trials.budget import UNBOUNDED_TRIALS, Spending, change_budgets, create_spending, read_spending
from hpsearch.storage.trials.claim_results import Claim, NoTrialAvailable
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome
from hpsearch.storage.trials.reopening import reopen_trial, requeue_trials_stopped_by_budget
from tests.storage.trials.support import begin_at_once, budget, kill, rows, set_retries, take

EPOCHS = 4  # epochs of a full trial

Join = Callable[..., Claims]


@pytest.fixture
def spend(storage: BaseStorage, engine: sa.Engine, study_id: int) -> Callable[..., None]:
    def give(*, epochs: int | None = None, seconds: float | None = None) -> None:
        budget(storage, study_id, n_trials=1000)
        with engine.begin() as connection:
            create_spending(connection, study_id, epochs=epochs, seconds=seconds)

    return give


@pytest.fixture
def claims(engine: sa.Engine, study_id: int) -> Claims:
    return Claims(engine, study_id, worker="w", retry_seconds=10.0, metered_epochs=EPOCHS)


def spent(engine: sa.Engine, study_id: int) -> int:
    """Return the counted budget, and assert that it equals the reported one."""
    spending = read_spending(engine, study_id)
    assert spending is not None
    [(reported,)] = rows(engine, "SELECT count(*) FROM trial_intermediate_values")
    assert spending.epochs == reported
    return spending.epochs


def run(claims: Claims, claim: Claim, *, first: int = 0) -> bool:
    """Report epochs as a worker does; return whether the trial reached its last epoch."""
    for epoch in range(first, EPOCHS):
        reported = claims.report(claim, epoch, 0.5)
        if not reported.is_counted or (epoch < EPOCHS - 1 and not reported.has_budget):
            claims.finish_attempt(claim, Outcome.RELEASED)
            return False
    claims.finish_attempt(claim, Outcome.COMPLETE, value=0.5)
    return True


def test_a_trial_is_pruned_when_the_budget_is_spent_with_that_reason(
    spend: Callable[..., None], claims: Claims, engine: sa.Engine, study_id: int, storage: BaseStorage
) -> None:
    spend(epochs=6)
    assert run(claims, take(claims))
    assert not run(claims, take(claims))
    retired = claims.claim()
    assert isinstance(retired, PrunedTrial)
    assert retired.is_out_of_budget
    assert retired.reason == "after epoch 2 of 4: the budget of 6 epochs was spent"
    assert claims.claim() == NoTrialAvailable(running_trials=0)
    assert not claims.has_trials_left()
    trial = storage.get_trial(retired.trial_id)
    assert (trial.state, trial.value, trial.user_attrs[REASON]) == (TrialState.PRUNED, 0.5, retired.reason)
    assert trial.user_attrs[BUDGET_CUT] is True
    assert trial.duration is not None, "the trial waited without a start time"
    assert spent(engine, study_id) == 6


def test_running_epochs_of_other_trials_count_in_the_budget(
    spend: Callable[..., None], claims: Claims, engine: sa.Engine, study_id: int
) -> None:
    spend(epochs=2)
    first, second = take(claims), take(claims)
    assert claims.claim() == NoTrialAvailable(running_trials=2)
    assert not claims.report(first, 0, 0.5).has_budget  # the second trial trains the other epoch now
    claims.finish_attempt(first, Outcome.RELEASED)
    assert claims.claim() == NoTrialAvailable(running_trials=1)
    claims.finish_attempt(second, Outcome.FAILED)  # it did not use its epoch
    again = take(claims)
    assert again.trial_id == first.trial_id
    assert claims.report(again, 1, 0.5).is_counted
    assert spent(engine, study_id) == 2


def test_an_epoch_beyond_the_budget_is_not_written(
    spend: Callable[..., None], claims: Claims, engine: sa.Engine, study_id: int
) -> None:
    spend(epochs=2)
    claim = take(claims)
    assert [claims.report(claim, epoch, 0.5).is_counted for epoch in range(4)] == [True, True, False, False]
    assert claims.report(claim, 1, 0.5).is_counted  # again, after a crash
    assert spent(engine, study_id) == 2


def test_an_epoch_trained_again_after_a_crash_is_counted_once(
    spend: Callable[..., None], claims: Claims, engine: sa.Engine, study_id: int
) -> None:
    spend(epochs=8)
    claim = take(claims)
    for epoch in range(3):
        claims.report(claim, epoch, 0.5)
    kill(engine, claim)
    assert run(claims, take(claims))
    assert spent(engine, study_id) == 4


def test_a_trial_with_all_epochs_completes_with_a_spent_budget(
    spend: Callable[..., None], claims: Claims, engine: sa.Engine, study_id: int
) -> None:
    spend(epochs=EPOCHS)
    claim = take(claims)
    for epoch in range(EPOCHS):
        claims.report(claim, epoch, 0.5)
    kill(engine, claim)  # before it was completed
    again = take(claims)
    assert run(claims, again, first=EPOCHS - 1)
    assert claims.claim() == NoTrialAvailable(running_trials=0)
    assert spent(engine, study_id) == EPOCHS


def test_deleted_epochs_of_a_restarted_trial_are_not_counted(
    spend: Callable[..., None], claims: Claims, engine: sa.Engine, study_id: int
) -> None:
    spend(epochs=8)
    claim = take(claims)
    claims.report(claim, 0, 0.5)
    claims.finish_attempt(claim, Outcome.FAILED)
    assert spent(engine, study_id) == 1
    assert reopen_trial(engine, study_id, claim.trial_id, from_start=True)[0]
    assert spent(engine, study_id) == 0


def test_trials_pruned_by_the_budget_continue_with_a_larger_one(
    spend: Callable[..., None], claims: Claims, engine: sa.Engine, study_id: int, storage: BaseStorage
) -> None:
    spend(epochs=2)
    run(claims, take(claims))
    assert isinstance(claims.claim(), PrunedTrial)
    with engine.begin() as connection:
        assert not change_budgets(connection, study_id, epochs=2, seconds=None)
        assert change_budgets(connection, study_id, epochs=5, seconds=None)
        assert requeue_trials_stopped_by_budget(connection, study_id) == 1
    again = take(claims)
    trial = storage.get_trial(again.trial_id)
    assert (again.number, again.attempt, trial.value) == (0, 2, None)
    assert not {BUDGET_CUT, REASON} & trial.user_attrs.keys()
    assert run(claims, again, first=2)
    assert not run(claims, take(claims))
    assert spent(engine, study_id) == 5


def test_a_time_budget_counts_seconds_between_reports_and_prunes_after_the_epoch(
    spend: Callable[..., None], claims: Claims, engine: sa.Engine, study_id: int
) -> None:
    spend(seconds=100.0)
    claim = take(claims)

    def let_pass(seconds: int) -> None:
        with engine.begin() as connection:
            for column in ("started_at", "reported_at"):
                connection.execute(
                    sa.text(f"UPDATE hpsearch_attempts SET {column} = {column} - {seconds} * interval '1 second'")
                )

    let_pass(60)
    assert claims.report(claim, 0, 0.5).has_budget
    let_pass(30)
    assert claims.report(claim, 1, 0.5).has_budget
    let_pass(60)
    reported = claims.report(claim, 2, 0.5)
    assert reported.is_counted, "it was begun in time"
    assert not reported.has_budget
    claims.finish_attempt(claim, Outcome.RELEASED)
    spending = read_spending(engine, study_id)
    assert spending is not None
    assert 150 <= spending.seconds < 180
    retired = claims.claim()
    assert isinstance(retired, PrunedTrial)
    assert retired.reason == "after epoch 3 of 4: the budget of 100 s was spent"


def test_trials_waiting_at_a_rung_are_pruned_when_the_budget_is_spent(
    spend: Callable[..., None], engine: sa.Engine, study_id: int
) -> None:
    spend(epochs=EPOCHS + 2)
    rungs = Rungs("asha", (1,), EPOCHS, 2, maximize=True)
    claims = Claims(engine, study_id, worker="w", rungs=rungs, metered_epochs=EPOCHS)
    first = take(claims)  # without a complete trial, the rest of the budget would complete one
    for epoch in range(EPOCHS):
        claims.report(first, epoch, 0.3)
    claims.finish_attempt(first, Outcome.COMPLETE, value=0.3)
    held = [take(claims) for _ in range(2)]
    for claim, value in zip(held, (0.2, 0.1), strict=True):
        claims.report(claim, 0, value)
        assert not claims.report_rung(claim, 0, value).is_promoted
    ended = [claims.claim() for _ in range(3)]
    assert [type(each) for each in ended] == [PrunedTrial, PrunedTrial, NoTrialAvailable]
    reasons = [each.reason for each in ended if isinstance(each, PrunedTrial)]
    assert reasons[1].endswith(f"rank 1 of 2 at rung 0, the budget of {EPOCHS + 2} epochs was spent")
    assert not any(each.is_out_of_budget for each in ended if isinstance(each, PrunedTrial))
    assert spent(engine, study_id) == EPOCHS + 2


def test_a_study_without_such_a_budget_needs_no_further_query(
    engine: sa.Engine, study_id: int, join: Join, storage: BaseStorage
) -> None:
    claims, sent = join(), []
    claim = take(claims)

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        sent.append(statement)

    sa.event.listen(engine, "before_cursor_execute", note)
    claims.report(claim, 0, 0.5)
    claims.finish_attempt(claim, Outcome.RELEASED)
    take(claims)
    sa.event.remove(engine, "before_cursor_execute", note)
    assert not [statement for statement in sent if "hpsearch_spending" in statement]


def test_the_texts_about_budgets() -> None:
    both = Spending(2000, 7200.0, epochs=120, seconds=3600.4)
    assert both.summary == "120/2000 epochs, 3600/7200 s"
    assert both.spent_fraction == pytest.approx(0.5, abs=0.001)
    assert not both.is_exhausted
    assert UNBOUNDED_TRIALS == MAX_TRIALS


WORKER_PROGRAM = """
import sys, random
from hpsearch.storage.database.connect import make_engine
from hpsearch.storage.rungs.rungs import PrunedTrial
from hpsearch.storage.trials.claim_results import Claim, NoTrialAvailable
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome
claims = Claims(make_engine(sys.argv[1], application_name="w"), int(sys.argv[2]), worker="w", metered_epochs=5)
print("ready", flush=True)
sys.stdin.readline()
while (claim := claims.claim()) != NoTrialAvailable(0):
    if not isinstance(claim, Claim):
        continue
    drawn = random.Random(claim.number)
    for epoch in range(5):
        reported = claims.report(claim, epoch, 0.5)
        print("reported", flush=True)
        if not reported.is_counted or (epoch < 4 and not reported.has_budget):
            claims.finish_attempt(claim, Outcome.RELEASED)
            break
        if epoch < 4 and drawn.random() < 0.2:
            claims.finish_attempt(claim, Outcome.PRUNED, value=0.5)
            break
    else:
        claims.finish_attempt(claim, Outcome.COMPLETE, value=0.5)
"""


@pytest.mark.soak
def test_many_processes_with_kills_spend_exactly_the_budget(
    storage: BaseStorage, engine: sa.Engine, study_id: int, database_url: str, owner_url: str
) -> None:
    set_retries(owner_url, study_id, 50, n_trials=1000)
    with engine.begin() as connection:
        create_spending(connection, study_id, epochs=203, seconds=None)
    command = [sys.executable, "-c", WORKER_PROGRAM, database_url, str(study_id)]
    workers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(5)]
    begin_at_once(workers)
    for worker in workers[:2]:  # while it runs
        assert worker.stdout is not None
        for _ in range(10):
            assert worker.stdout.readline() == "reported\n"
        worker.send_signal(signal.SIGKILL)
    for worker in workers:
        worker.communicate()
    assert [worker.returncode for worker in workers] == [-signal.SIGKILL] * 2 + [0] * 3
    assert spent(engine, study_id) == 203
    trials = storage.get_all_trials(study_id)
    assert {t.state for t in trials} == {TrialState.COMPLETE, TrialState.PRUNED}
    assert all(len(t.intermediate_values) == 5 for t in trials if t.state == TrialState.COMPLETE)
    cut = [t for t in trials if BUDGET_CUT in t.user_attrs]
    assert all(t.user_attrs[REASON].endswith("the budget of 203 epochs was spent") for t in cut)
    assert storage.get_study_user_attrs(study_id)[SPEC]["n_trials"] == 1000
