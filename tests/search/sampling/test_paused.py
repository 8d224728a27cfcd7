"""A sampler uses a waiting trial like one that was pruned at its epoch."""

from __future__ import annotations

import subprocess
import sys

import optuna
import pytest
from optuna.samplers import TPESampler
from optuna.trial import TrialState

from hpsearch.search.samplers.known_trials import make_sampler_study_view
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage

LR = optuna.distributions.FloatDistribution(1e-4, 1.0, log=True)


def study_with(storage: PostgresStorage, name: str, state: TrialState) -> optuna.Study:
    """Create a study of twelve trials that reported one epoch each, and an enqueued one."""
    study = optuna.create_study(storage=storage, study_name=name)
    for number in range(12):
        study.add_trial(
            optuna.create_trial(
                state=state,
                params={"lr": 0.7 ** (number + 1)},
                distributions={"lr": LR},
                intermediate_values={0: abs(number - 4.0)},
            )
        )
    study.enqueue_trial({"lr": 0.5})
    return study


def suggested(study: optuna.Study) -> float:
    """Return TPE's next suggestion."""
    study.sampler = TPESampler(seed=3, n_startup_trials=10)
    trial = optuna.Trial(study, study._storage.create_new_trial(study._study_id))
    return trial.suggest_float("lr", 1e-4, 1.0, log=True)


@pytest.fixture
def storage(database_url: str) -> PostgresStorage:
    return open_storage(database_url, application_name="test storage")


def test_paused_trials_count_as_pruned(storage: PostgresStorage) -> None:
    expected = suggested(study_with(storage, "pruned", TrialState.PRUNED))
    assert suggested(make_sampler_study_view(study_with(storage, "waits", TrialState.WAITING))) == expected
    assert suggested(study_with(storage, "unseen", TrialState.WAITING)) != expected


def test_the_stored_trials_are_not_changed(storage: PostgresStorage) -> None:
    study = make_sampler_study_view(study_with(storage, "waits", TrialState.WAITING))
    shown = study.get_trials(deepcopy=False, states=(TrialState.PRUNED, TrialState.COMPLETE))
    assert [(t.number, t.state) for t in shown] == [(number, TrialState.PRUNED) for number in range(12)]
    assert {t.state for t in storage.get_all_trials(study._study_id)} == {TrialState.WAITING}
    assert {t.state for t in study.trials} == {TrialState.WAITING}
    with_waiting = study.get_trials(deepcopy=False, states=(TrialState.PRUNED, TrialState.WAITING))
    assert [t.number for t in with_waiting] == list(range(13))


PROGRAM = """
import sys
from tests.search.sampling.test_paused import suggested_to_a_worker
print(suggested_to_a_worker(sys.argv[1], sys.argv[2]))
"""


def suggested_to_a_worker(url: str, name: str) -> float:
    storage = open_storage(url, application_name="test")
    return suggested(make_sampler_study_view(optuna.load_study(study_name=name, storage=storage)))


def test_two_processes_suggest_the_same(storage: PostgresStorage, database_url: str) -> None:
    for name in ("a", "b"):
        study_with(storage, name, TrialState.WAITING)
    command = [sys.executable, "-c", PROGRAM, database_url, "b"]
    other = subprocess.run(command, capture_output=True, text=True, check=True)
    assert other.stdout == f"{suggested_to_a_worker(database_url, 'a')}\n"
