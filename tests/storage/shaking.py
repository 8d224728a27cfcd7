"""Run trials with all kinds of calls, and check that all are stored."""

from __future__ import annotations

from optuna.trial import TrialState, create_trial

from hpsearch.storage.study_storage.storage import PostgresStorage
from tests.factories import X

COMPLETE = (TrialState.COMPLETE,)


def run_trials(storage: PostgresStorage, study_id: int, trials: int) -> list[int]:
    """Run trials by all kinds of calls; each step's value encodes the trial and the step."""
    made = []
    for _ in range(trials):
        trial_id = storage.create_new_trial(study_id)
        storage.set_trial_param(trial_id, "x", 0.5, X)
        for step in range(4):
            storage.set_trial_intermediate_value(trial_id, step, trial_id * 10.0 + step)
            storage.set_trial_user_attr(trial_id, f"a{step}", step)
            storage.get_all_trials(study_id, deepcopy=False, states=COMPLETE)
        assert storage.set_trial_state_values(trial_id, TrialState.COMPLETE, [float(trial_id)])
        made.append(trial_id)
    made += storage.import_trials(study_id, [create_trial(value=-1.0, params={"x": 0.5}, distributions={"x": X})] * 2)
    return made


def check(storage: PostgresStorage, study_id: int, made: list[list[int]]) -> None:
    """Assert that the study has exactly the created trials, each with all its data."""
    trials = storage.get_all_trials(study_id)
    assert [t.number for t in trials] == list(range(len(trials)))
    assert [t._trial_id for t in trials] == sorted(trial_id for one in made for trial_id in one)
    for trial in trials:
        assert trial.state == TrialState.COMPLETE
        assert trial.params == {"x": 0.5}
        if trial.value != -1.0:
            assert trial.value == trial._trial_id
            assert trial.intermediate_values == {step: trial._trial_id * 10.0 + step for step in range(4)}
            assert trial.user_attrs == {f"a{step}": step for step in range(4)}
