"""Multi-objective trials: the values of epochs and of complete trials, also when a trial restarts from scratch."""

from __future__ import annotations

import optuna
import pytest
import sqlalchemy as sa
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import TrialState

from hpsearch.storage.attributes import REASON
from hpsearch.storage.checkpoints.store import StoredFile
from hpsearch.storage.errors import ClaimLostError
from hpsearch.storage.rungs.rungs import PrunedTrial, Rungs
from hpsearch.storage.trials.budget import create_spending
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome
from hpsearch.storage.trials.history import read_epoch_values
from hpsearch.storage.trials.reopening import reopen_trial, requeue_trials_stopped_by_budget
from tests.storage.trials.support import budget, kill, rows, take

RUNGS = Rungs("asha", epochs=(1, 2), max_epochs=4, factor=2, maximize=True, maximize_each=(True, False))


@pytest.fixture
def study_id(storage: BaseStorage) -> int:
    """Create a study of two metrics."""
    study_id = storage.create_new_study([StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE], "s")
    budget(storage, study_id, n_trials=8)
    return study_id


@pytest.fixture
def claims(engine: sa.Engine, study_id: int) -> Claims:
    return Claims(engine, study_id, worker="w", retry_seconds=10.0)


def known(engine: sa.Engine) -> list[tuple[int, int, list[float]]]:
    """Return trial, epoch and values of all reports."""
    query = """
        SELECT number, step, metrics FROM hpsearch_epoch_values JOIN trials USING (trial_id) ORDER BY number, step
    """
    return [tuple(row) for row in rows(engine, query)]


def test_an_epoch_writes_all_metrics_once_with_one_statement(claims: Claims, engine: sa.Engine) -> None:
    claim = take(claims)
    said: list[str] = []
    sa.event.listen(engine, "before_cursor_execute", lambda *arguments: said.append(arguments[2]))
    claims.report(claim, 0, 0.5, metrics=[0.5, 10.0])
    assert len(said) == 1
    claims.report(claim, 0, 0.6, metrics=[0.6, 5.0])  # a retried epoch keeps its values
    claims.report(claim, 1, 0.7, metrics=[0.7, 8.0])
    assert known(engine) == [(0, 0, [0.5, 10.0]), (0, 1, [0.7, 8.0])]
    query = "SELECT step, intermediate_value FROM trial_intermediate_values ORDER BY step"
    assert [tuple(row) for row in rows(engine, query)] == [(0, 0.5), (1, 0.7)]


def test_a_worker_that_lost_its_trial_writes_no_metrics(claims: Claims, engine: sa.Engine, study_id: int) -> None:
    claim = take(claims)
    kill(engine, claim)
    again = take(Claims(engine, study_id, worker="other"))
    assert again.trial_id == claim.trial_id
    with pytest.raises(ClaimLostError, match="was taken over by other"):
        claims.report(claim, 0, 0.5, metrics=[0.5, 10.0])
    assert known(engine) == []


def test_an_epoch_beyond_the_budget_stores_no_values(storage: BaseStorage, engine: sa.Engine, study_id: int) -> None:
    with engine.begin() as connection:
        create_spending(connection, study_id, epochs=2, seconds=None)
    claims = Claims(engine, study_id, worker="w", retry_seconds=10.0, metered_epochs=4)
    claim = take(claims)
    counted = [claims.report(claim, step, 0.5, metrics=[0.5, float(step)]).is_counted for step in range(3)]
    assert counted == [True, True, False]
    assert known(engine) == [(0, 0, [0.5, 0.0]), (0, 1, [0.5, 1.0])]
    assert claims.report(claim, 1, 0.9, metrics=[0.9, 9.0]).is_counted, "one that was reported before is paid for"
    claims.finish_attempt(claim, Outcome.RELEASED)
    cut = claims.claim()
    assert isinstance(cut, PrunedTrial)
    assert storage.get_trial(cut.trial_id).values == [0.5, 1.0]
    with engine.begin() as connection:
        assert requeue_trials_stopped_by_budget(connection, study_id) == 1
    waits = storage.get_trial(cut.trial_id)
    assert (waits.state, waits.values) == (TrialState.WAITING, None)
    assert len(known(engine)) == 2, "what was reported stays"


def test_plain_optuna_reads_all_values_and_constraints(claims: Claims, engine: sa.Engine, database_url: str) -> None:
    ends = [([0.9, 10.0], -1.0), ([0.8, 20.0], -1.0), ([0.7, 5.0], -1.0), ([0.95, 4.0], 2.5)]
    for values, violation in ends:
        system = {"constraints:model_mb": violation}
        claims.finish_attempt(take(claims), Outcome.COMPLETE, value=values, attrs={REASON: "done"}, system=system)
    pruned = take(claims)
    claims.finish_attempt(pruned, Outcome.PRUNED, value=[0.1, 50.0])
    study = optuna.load_study(study_name="s", storage=database_url)
    assert study.directions == [StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE]
    assert [trial.values for trial in study.trials] == [*(values for values, _ in ends), [0.1, 50.0]]
    assert [trial.constraints for trial in study.trials[:4]] == [{"model_mb": each} for _, each in ends]
    assert study.trials[4].state == TrialState.PRUNED
    assert sorted(trial.number for trial in study.best_trials) == [0, 2], "who breaks a constraint is not among them"


def test_a_result_with_a_nan_stores_no_values(claims: Claims, storage: BaseStorage) -> None:
    claim = take(claims)
    claims.finish_attempt(claim, Outcome.INFEASIBLE, value=[0.5, float("nan")])
    assert storage.get_trial(claim.trial_id).values is None
    claim = take(claims)
    claims.finish_attempt(claim, Outcome.PRUNED, value=[0.5, float("inf")])
    assert storage.get_trial(claim.trial_id).values == [0.5, float("inf")]


def test_a_trial_pruned_while_waiting_has_all_values_of_its_last_epoch(
    storage: BaseStorage, engine: sa.Engine, study_id: int, database_url: str
) -> None:
    claims = Claims(engine, study_id, worker="w", retry_seconds=10.0, rungs=RUNGS)
    claim = take(claims)
    claims.report(claim, 0, 0.5, metrics=[0.5, 10.0])
    standing = claims.report_rung(claim, 0, [0.5, 10.0], system={"constraints:model_mb": 1.5})
    assert not standing.is_promoted
    assert storage.get_trial(claim.trial_id).constraints == {"model_mb": 1.5}, "a sampler learns while it waits"
    retired = claims.claim(open_new=False)
    assert isinstance(retired, PrunedTrial)
    trial = optuna.load_study(study_name="s", storage=database_url).trials[0]
    assert (trial.state, trial.values) == (TrialState.PRUNED, [0.5, 10.0])
    assert retired.decision == {"pruner": "asha", "epoch": 0, "value": 0.5, "peers": 0, "rung": 0}


@pytest.mark.parametrize("from_start", [False, True])
def test_a_retried_trial_keeps_only_the_values_before_its_checkpoint(
    claims: Claims, engine: sa.Engine, study_id: int, from_start: bool
) -> None:
    claim = take(claims)
    for step in range(2):
        stored = StoredFile(f"at-{step}", "0" * 64, 10) if step == 0 else None
        claims.report(claim, step, 0.5, stored, metrics=[0.5, float(step)])
    claims.finish_attempt(claim, Outcome.FAILED)
    assert reopen_trial(engine, study_id, claim.trial_id, from_start=from_start) == (True, None if from_start else 0)
    assert known(engine) == ([] if from_start else [(0, 0, [0.5, 0.0])])
    again = take(claims)
    claims.report(again, 1, 0.5, metrics=[0.5, 7.0])
    assert known(engine)[-1] == (0, 1, [0.5, 7.0]), "its next epoch is written again"


def test_the_values_of_a_study_are_read_by_trial_and_epoch(
    claims: Claims, engine: sa.Engine, storage: BaseStorage, study_id: int
) -> None:
    first, second = take(claims), take(claims)
    claims.report(first, 0, 0.5, metrics=[0.5, 10.0])
    claims.report(second, 0, 0.6, metrics=[0.6, 11.0])
    claims.report(first, 1, 0.7, metrics=[0.7, 12.0])
    other = storage.create_new_study([StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE], "other")
    budget(storage, other, n_trials=1)
    elsewhere = Claims(engine, other, worker="w")
    elsewhere.report(take(elsewhere), 0, 0.1, metrics=[0.1, 0.1])
    assert read_epoch_values(engine, study_id) == {
        first.trial_id: {0: [0.5, 10.0], 1: [0.7, 12.0]},
        second.trial_id: {0: [0.6, 11.0]},
    }
    storage.delete_study(study_id)
    assert [tuple(row) for row in rows(engine, "SELECT step, metrics FROM hpsearch_epoch_values")] == [(0, [0.1, 0.1])]
