"""A failed or infeasible trial is retried with the same number."""

from __future__ import annotations

import math

import optuna
import pytest
from optuna.trial import TrialState

from hpsearch.search.errors import SearchError
from hpsearch.search.study.control import retry_trial
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import INFEASIBLE, REASON
from hpsearch.storage.checkpoints.store import StoredFile
from hpsearch.storage.study_storage.reading import get_rung_key
from hpsearch.storage.study_storage.storage import PostgresStorage
from hpsearch.storage.trials.claim_results import Claim, RetriesExhausted
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome
from hpsearch.storage.trials.process_identity import get_process_name
from tests.search.study.steering.support import Say, rows, take


def failed(claims: Claims, *, epochs: int = 0, checkpoint: int | None = None, state: str = "FAIL") -> Claim:
    """Run a trial that fails, or is infeasible, after some epochs; `checkpoint` is the last epoch with a checkpoint."""
    claim = take(claims)
    for epoch in range(epochs):
        kept = StoredFile(f"{epoch}.pt", "0" * 64, 1) if checkpoint is not None and epoch <= checkpoint else None
        claims.report(claim, epoch, 0.1 * epoch, kept)
    if state == "FAIL":
        claims.finish_attempt(claim, Outcome.FAILED, attrs={REASON: "a bug"})
    else:
        claims.report(claim, epochs, math.nan)
        claims.finish_attempt(claim, Outcome.INFEASIBLE, value=0.5, attrs={REASON: "NaN", INFEASIBLE: True})
    return claim


def test_a_retried_trial_runs_next_with_its_number_and_parameters(
    say: Say, claims: Claims, study: optuna.Study, storage: PostgresStorage
) -> None:
    claim = failed(claims)
    other = take(claims)
    storage.set_trial_param(other.trial_id, "x", 0.25, optuna.distributions.FloatDistribution(0, 1))
    claims.finish_attempt(other, Outcome.FAILED, attrs={REASON: "a bug"})
    assert "trial 1 will run again from scratch" in say("retry", "s", "--trial", "1")
    assert [t.state.name for t in study.trials] == ["FAIL", "WAITING"]
    again = take(claims)
    assert (again.trial_id, again.number, again.attempt) == (other.trial_id, 1, 2)
    trial = study.trials[1]
    assert (trial.state, trial.params, trial.datetime_complete) == (TrialState.RUNNING, {"x": 0.25}, None)
    assert REASON not in trial.user_attrs
    claims.finish_attempt(again, Outcome.COMPLETE, value=0.9)
    assert study.best_trial.number == 1
    assert claim.number == 0


def test_a_retried_trial_resumes_from_its_last_checkpoint(
    say: Say, claims: Claims, study: optuna.Study, database_url
) -> None:
    failed(claims, epochs=5, checkpoint=2)
    assert "from its checkpoint after epoch 3" in say("retry", "s", "--trial", "0")
    assert study.trials[0].intermediate_values == {0: 0.0, 1: 0.1, 2: 0.2}
    assert rows(database_url, "SELECT epoch FROM hpsearch_checkpoints ORDER BY epoch") == [(1,), (2,)]


def test_from_start_deletes_all_reports_of_the_trial(
    say: Say, claims: Claims, study: optuna.Study, storage: PostgresStorage, database_url: str
) -> None:
    claim = failed(claims, epochs=5, checkpoint=2)
    storage.get_all_trials(study._study_id)
    assert "from scratch" in say("retry", "s", "--trial", "0", "--from-start")
    assert study.trials[0].intermediate_values == {}
    assert rows(database_url, "SELECT * FROM hpsearch_checkpoints") == []
    assert rows(database_url, "SELECT * FROM trial_values") == []
    assert claim.number == take(claims).number


def test_retrying_an_infeasible_trial_deletes_nan_value_and_mark(
    say: Say, claims: Claims, study: optuna.Study, storage: PostgresStorage
) -> None:
    claim = failed(claims, epochs=2, checkpoint=1, state="PRUNED")
    storage.get_all_trials(study._study_id)  # this process has it in its cache as finished
    say("retry", "s", "--trial", "0")
    trial = study.trials[0]
    assert (trial.state, trial.value, trial.intermediate_values) == (TrialState.WAITING, None, {0: 0.0, 1: 0.1})
    assert not {INFEASIBLE, REASON} & set(trial.user_attrs)
    assert claim.number == take(claims).number


def test_rungs_are_deleted_with_the_epochs(
    say: Say, claims: Claims, study: optuna.Study, storage: PostgresStorage
) -> None:
    claim = take(claims)
    claims.report(claim, 1, 0.5)
    storage.set_trial_system_attr(claim.trial_id, get_rung_key(0), 0.5)
    storage.set_trial_system_attr(claim.trial_id, "fixed_params", {"x": 1})
    claims.finish_attempt(claim, Outcome.FAILED)
    say("retry", "s", "--trial", "0")
    assert study.trials[0].system_attrs == {"fixed_params": {"x": 1}}


def test_retry_resets_the_count_of_retries(say: Say, claims: Claims, database_url: str) -> None:
    for _ in range(2):
        take(claims)
        bury_workers(database_url)
    assert isinstance(claims.claim(), RetriesExhausted), "one retry, and the second worker died too"
    say("retry", "s", "--trial", "0")
    take(claims)
    bury_workers(database_url)
    again = take(claims)
    assert (again.number, again.attempt) == (0, 4)
    outcomes = "SELECT attempt, outcome FROM hpsearch_attempts ORDER BY attempt"
    assert rows(database_url, outcomes) == [(1, "lost, retried"), (2, "lost, retried"), (3, "lost"), (4, None)]


def bury_workers(url: str) -> None:
    """Make the workers of live attempts look like dead ones of this machine."""
    machine, pid, _ = get_process_name().rsplit("/", 2)
    rows(url, f"UPDATE hpsearch_attempts SET process = '{machine}/{pid}/1' RETURNING 1")


def test_retry_takes_an_externally_failed_trial_from_its_worker(
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


def test_trials_that_cannot_be_retried_are_rejected(say: Say, claims: Claims, study: optuna.Study) -> None:
    claims.finish_attempt(take(claims), Outcome.COMPLETE, value=0.9)
    claims.finish_attempt(take(claims), Outcome.PRUNED, value=0.1, attrs={REASON: "median pruner at epoch 2 of 5: ..."})
    running = take(claims)
    only = "only failed and infeasible trials can be retried"
    assert f"--trial 0: the trial is complete; {only}" in say("retry", "s", "--trial", "0", code=2)
    assert "the trial was pruned (median pruner at epoch 2 of 5: ...)" in say("retry", "s", "--trial", "1", code=2)
    assert "the trial is running" in say("retry", "s", "--trial", "2", code=2)
    claims.finish_attempt(running, Outcome.RELEASED)
    assert "the trial is waiting" in say("retry", "s", "--trial", "2", code=2)
    assert "has no such trial; give a number from 0 to 2" in say("retry", "s", "--trial", "9", code=2)
    assert "--trial" in say("retry", "s", code=2)
    assert "-1" in say("retry", "s", "--trial", "-1", code=2)
    assert [t.state.name for t in study.trials] == ["COMPLETE", "PRUNED", "WAITING"]


def test_show_of_a_study_without_trials(stored: StoredStudy) -> None:
    with pytest.raises(SearchError, match="it has no trials yet"):
        retry_trial(stored, 0)
