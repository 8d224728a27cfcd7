"""Claims: the budget is exact, a trial has one worker at a time, and no trial is lost with its worker."""

from __future__ import annotations

import json
import time

import optuna
import pytest
import sqlalchemy as sa
from optuna.storages import BaseStorage
from optuna.trial import TrialState

from hpsearch.storage.attributes import ATTEMPT, REASON, SPEC, STOPPED, WORKER
from hpsearch.storage.checkpoints.store import StoredFile
from hpsearch.storage.errors import ClaimLostError, StorageError
from hpsearch.storage.trials.claim_results import NoTrialAvailable, RetriesExhausted, StudyStopped
from hpsearch.storage.trials.finishing import Outcome
from hpsearch.storage.trials.history import read_attempts
from hpsearch.storage.trials.lost_attempts import LossCause, count_running_trials, record_loss_cause
from hpsearch.storage.trials.worker_registry import read_attempt_ends, read_loss_counts
from tests.storage.trials.support import Join, budget, kill, outcomes, rows, set_retries, states, take


def test_the_budget_limits_the_started_trials(storage: BaseStorage, study_id: int, join: Join) -> None:
    assert [take(join()).number, take(join()).number] == [0, 1]
    assert join().claim() == NoTrialAvailable(running_trials=2)
    assert states(storage, study_id) == ["RUNNING", "RUNNING"]


def test_a_new_trial_equals_that_of_optuna(storage: BaseStorage, study_id: int, join: Join) -> None:
    claim = take(join())
    trial = storage.get_trial(claim.trial_id)
    assert (trial.number, trial.state, trial.params, trial.intermediate_values) == (0, TrialState.RUNNING, {}, {})
    assert trial.datetime_start is not None
    assert abs(trial.datetime_start.timestamp() - time.time()) < 60
    assert trial.user_attrs == {ATTEMPT: 1, WORKER: "w1"}


def test_a_spent_budget_allows_no_claim_until_it_is_raised(storage: BaseStorage, study_id: int, join: Join) -> None:
    claims = join()
    for value in (0.5, 0.25):
        claims.finish_attempt(take(claims), Outcome.COMPLETE, value=value, attrs={REASON: "well done"})
    assert claims.claim() == NoTrialAvailable(running_trials=0)
    assert optuna.load_study(study_name="s", storage=storage).best_value == 0.5
    assert storage.get_all_trials(study_id)[0].user_attrs[REASON] == "well done"
    budget(storage, study_id, n_trials=3)
    assert claims.claim(open_new=False) == NoTrialAvailable(running_trials=0)
    assert take(claims).number == 2


def test_the_trial_of_a_dead_worker_is_taken_over_at_once_with_parameters(
    storage: BaseStorage, engine: sa.Engine, study_id: int, join: Join
) -> None:
    budget(storage, study_id, n_trials=1)
    dying, living = join(), join()
    claim = take(dying)
    study = optuna.load_study(study_name="s", storage=storage)
    value = optuna.trial.Trial(study, claim.trial_id).suggest_float("x", 0, 1)
    assert living.claim() == NoTrialAvailable(running_trials=1)
    kill(engine, claim)
    again = take(living)
    assert (again.trial_id, again.number, again.attempt, again.is_resumed) == (claim.trial_id, 0, 2, True)
    assert storage.get_trial(again.trial_id).params == {"x": value}
    assert outcomes(engine) == [(1, "lost"), (2, None)]


def test_a_trial_that_kills_its_workers_fails(
    storage: BaseStorage, engine: sa.Engine, study_id: int, join: Join
) -> None:
    budget(storage, study_id, n_trials=1)
    for _ in range(2):
        kill(engine, take(join()))
    join().reclaim_expired_leases()  # leaves it to a claim to fail the trial, which also ends the trial's run
    assert states(storage, study_id) == ["RUNNING"]
    lost = join().claim()
    assert isinstance(lost, RetriesExhausted)
    assert join().claim() == NoTrialAvailable(running_trials=0)
    trial = storage.get_all_trials(study_id)[0]
    assert trial.state == TrialState.FAIL
    assert trial.datetime_complete is not None
    assert trial.user_attrs[REASON] == lost.reason
    assert lost.reason == "lost its worker w2; 2 attempts without progress"


def test_losses_of_unknown_cause_count_in_part(
    storage: BaseStorage, engine: sa.Engine, study_id: int, join: Join
) -> None:
    """Ten before the training count as one failure, and four in the training."""
    budget(storage, study_id, n_trials=1)  # with one retry
    for number in range(13):
        worker = join(may_be_preempted=True)
        claim = take(worker)
        if number >= 10:
            worker.begin_training(claim)
        kill(engine, claim)
    last = take(worker := join(may_be_preempted=True))
    assert last.attempt == 14
    worker.begin_training(last)
    kill(engine, last)
    lost = join().claim()
    assert isinstance(lost, RetriesExhausted)
    assert lost.reason == "lost its worker w14; 14 attempts without progress"


def test_the_cause_of_a_loss_decides_how_it_counts(
    storage: BaseStorage, engine: sa.Engine, study_id: int, join: Join
) -> None:
    """The parent of a worker records the cause before or after another worker ends the attempt."""
    budget(storage, study_id, n_trials=1)  # with one retry
    for number, cause in enumerate([*[LossCause.KILLED] * 4, LossCause.OUT_OF_MEMORY]):
        claim = take(join())
        process = kill(engine, claim)
        if number % 2:
            join().reclaim_expired_leases()
        record_loss_cause(engine, process, cause)
    lost = join().claim()
    assert isinstance(lost, RetriesExhausted)
    assert lost.reason.endswith("; 5 attempts without progress (killed, out of memory)")
    found = [attempt.outcome for attempt in read_attempts(engine, [claim.trial_id])[claim.trial_id]]
    assert found == [*["killed"] * 4, "out of memory"]
    assert read_attempt_ends(engine, study_id)[0].outcome == "out of memory"
    assert read_loss_counts(engine, study_id) == {"killed": 4, "out of memory": 1}


def test_an_attempt_that_its_worker_gave_up_counts_in_full(
    storage: BaseStorage, engine: sa.Engine, study_id: int, join: Join
) -> None:
    budget(storage, study_id, n_trials=1)
    for _ in range(2):
        worker = join(may_be_preempted=True)
        claim = take(worker)
        worker.expire_lease(claim)
        kill(engine, claim)
    assert isinstance(join().claim(), RetriesExhausted)


def test_a_sweep_returns_the_trials_of_dead_workers(
    storage: BaseStorage, engine: sa.Engine, study_id: int, join: Join
) -> None:
    kill(engine, take(join()))
    assert states(storage, study_id) == ["RUNNING"]
    join().reclaim_expired_leases()
    assert states(storage, study_id) == ["WAITING"]
    assert outcomes(engine) == [(1, "lost")]


def test_a_released_trial_is_claimed_next_and_costs_no_retry(
    storage: BaseStorage, engine: sa.Engine, study_id: int, join: Join
) -> None:
    claims = join()
    for attempt in range(1, 5):
        claim = take(claims)
        assert (claim.number, claim.attempt) == (0, attempt)
        claims.finish_attempt(claim, Outcome.RELEASED)
        assert states(storage, study_id) == ["WAITING"]
    assert {outcome for _, outcome in outcomes(engine)} == {"released"}


def test_released_trials_count_in_the_budget_and_enqueued_ones_do_not_exceed_it(
    storage: BaseStorage, study_id: int, join: Join
) -> None:
    budget(storage, study_id, n_trials=1)
    claims = join()
    claims.finish_attempt(take(claims), Outcome.RELEASED)
    study = optuna.load_study(study_name="s", storage=storage)
    study.enqueue_trial({"x": 0.5})
    assert take(claims).number == 0
    assert join().claim() == NoTrialAvailable(running_trials=1)
    budget(storage, study_id, n_trials=2)
    enqueued = take(join())
    assert enqueued.number == 1
    assert optuna.trial.Trial(study, enqueued.trial_id).suggest_float("x", 0, 1) == 0.5


def test_a_trial_created_in_a_notebook_is_not_claimed(storage: BaseStorage, study_id: int, join: Join) -> None:
    optuna.load_study(study_name="s", storage=storage).ask()
    assert take(join()).number == 1
    assert join().claim() == NoTrialAvailable(running_trials=1)


def test_an_externally_ended_trial_is_lost(storage: BaseStorage, engine: sa.Engine, study_id: int, join: Join) -> None:
    claims = join()
    claim = take(claims)
    storage.set_trial_state_values(claim.trial_id, TrialState.FAIL)
    with pytest.raises(ClaimLostError, match="trial 0 was set to FAIL by another program"):
        claims.report(claim, 0, 0.5)
    with pytest.raises(ClaimLostError, match="trial 0 was set to FAIL by another program"):
        claims.finish_attempt(claim, Outcome.COMPLETE, value=0.5)
    claims.release(claim)
    assert outcomes(engine) == [(1, "cancelled")]
    other = take(claims)
    storage.set_trial_state_values(other.trial_id, TrialState.FAIL)
    kill(engine, other)
    assert claims.claim() == NoTrialAvailable(running_trials=0)
    assert outcomes(engine) == [(1, "cancelled"), (1, "cancelled")]


def test_a_stopped_study_allows_no_claim_and_stops_at_the_next_report(
    storage: BaseStorage, study_id: int, join: Join
) -> None:
    claims = join()
    claim = take(claims)
    assert not claims.report(claim, 0, 0.5).is_stopped
    storage.set_study_user_attr(study_id, STOPPED, "by ada at noon")
    assert claims.claim() == StudyStopped("by ada at noon")
    assert claims.report(claim, 1, 0.5).is_stopped
    claims.finish_attempt(claim, Outcome.RELEASED)
    storage.set_study_user_attr(study_id, STOPPED, None)
    assert take(claims).number == 0


def test_a_deleted_study_ends_the_search(storage: BaseStorage, study_id: int, join: Join) -> None:
    claims = join()
    claim = take(claims)
    storage.delete_study(study_id)
    with pytest.raises(StorageError, match="deleted"):
        claims.claim()
    with pytest.raises(ClaimLostError, match="was deleted with its study"):
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


def test_a_trial_can_complete_with_an_infinite_value(storage: BaseStorage, study_id: int, join: Join) -> None:
    claims = join()
    for value in (float("inf"), float("-inf")):
        claim = take(claims)
        claims.finish_attempt(claim, Outcome.COMPLETE, value=value)
        assert storage.get_trial(claim.trial_id).value == value


def stored(path: str) -> StoredFile:
    return StoredFile(path, "0" * 64, 1)


def test_a_checkpoint_is_recorded_with_its_epoch_and_two_are_kept(
    storage: BaseStorage, engine: sa.Engine, study_id: int, join: Join
) -> None:
    claims = join()
    claim = take(claims)
    query = "SELECT epoch, attempt, path FROM hpsearch_checkpoints ORDER BY epoch"
    for epoch in range(4):
        claims.report(claim, epoch, 0.5, stored(f"{epoch}-1.pt") if epoch != 2 else None)
    assert [tuple(row) for row in rows(engine, query)] == [(1, 1, "1-1.pt"), (3, 1, "3-1.pt")]
    claims.finish_attempt(claim, Outcome.RELEASED)
    again = take(claims)
    claims.report(again, 3, 0.5, stored("3-2.pt"))  # resumed from epoch 1, whose value is stored already
    assert [tuple(row) for row in rows(engine, query)] == [(1, 1, "1-1.pt"), (3, 2, "3-2.pt")]
    with pytest.raises(ClaimLostError):
        claims.report(claim, 4, 0.5, stored("4-1.pt"))
    assert len(rows(engine, query)) == 2


def test_an_executed_call_with_a_lost_reply_is_not_repeated(
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
        driver.close()  # the connection is lost at the commit or before its reply

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
    claims.finish_attempt(claim, Outcome.COMPLETE, value=0.5)
    assert not armed
    assert states(storage, study_id) == ["COMPLETE"]
    assert outcomes(engine) == [(1, "complete")]


def test_running_trials_are_listed_with_their_workers(engine: sa.Engine, study_id: int, join: Join) -> None:
    claims = join()
    first = take(claims)
    take(claims)
    assert count_running_trials(engine, study_id) == 2
    kill(engine, first)
    assert count_running_trials(engine, study_id) == 1


def test_the_spec_is_read_in_the_format_of_optuna(storage: BaseStorage, engine: sa.Engine, study_id: int) -> None:
    query = "SELECT value_json FROM study_user_attributes WHERE key = :key"
    assert json.loads(rows(engine, query, key=SPEC)[0].value_json) == {"n_trials": 2, "retries": 1}


def test_an_attempt_with_progress_costs_no_retry(
    storage: BaseStorage, engine: sa.Engine, study_id: int, owner_url: str, join: Join
) -> None:
    """Each attempt adds an epoch with a checkpoint before its worker dies. Later ones do not, so the trial fails."""
    set_retries(owner_url, study_id, 2, n_trials=1)
    for epoch in range(5):
        claims = join()
        claims.report(claim := take(claims), epoch, 0.5, stored(f"{epoch}.pt"))
        assert claims.count_failures(claim) == 0
        kill(engine, claim)
    for again in range(2):
        claims = join()
        claims.report(claim := take(claims), 4, 0.5, stored("4.pt"))  # trained again: no progress
        claims.report(claim, 5 + again, 0.5)  # an epoch without a checkpoint is no progress
        kill(engine, claim)
    lost = join().claim()
    assert isinstance(lost, RetriesExhausted)
    assert lost.reason == "lost its worker w7; 3 attempts without progress"
    assert outcomes(engine) == [(attempt, "lost") for attempt in range(1, 8)]
