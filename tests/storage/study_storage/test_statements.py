"""The number of SQL statements of each call and of a whole trial."""

from __future__ import annotations

import optuna
import pytest
import sqlalchemy as sa
from optuna.trial import TrialState, create_trial

from hpsearch.storage.study_storage.storage import PostgresStorage
from tests.factories import X
from tests.storage.conftest import Open
from tests.storage.statements import statements


@pytest.fixture
def storage(opened: Open) -> PostgresStorage:
    return opened("test", retry_seconds=5)


@pytest.fixture
def other(opened: Open) -> PostgresStorage:
    return opened("other", retry_seconds=5)


def test_the_statements_of_each_call(storage: PostgresStorage, study_id: int) -> None:
    def sent_by(*calls: object) -> list[int]:
        counts = []
        for call in calls:
            with statements(storage) as sent:
                call()  # type: ignore[operator]
            counts.append(len(sent))
        return counts

    storage.import_trials(study_id, [create_trial(value=1, params={"x": 1}, distributions={"x": X})] * 3)
    complete = (TrialState.COMPLETE,)
    trial_id = storage.create_new_trial(study_id)
    calls = {
        "create": lambda: storage.create_new_trial(study_id),
        "create from a template": lambda: storage.create_new_trial(study_id, create_trial(value=1.0)),
        "import": lambda: storage.import_trials(study_id, [create_trial(value=1.0)] * 900),
        "param": lambda: storage.set_trial_param(trial_id, "x", 0.5, X),
        "attr": lambda: storage.set_trial_user_attr(trial_id, "a", 1),
        "step": lambda: storage.set_trial_intermediate_value(trial_id, 0, 1.0),
        "unfinished": lambda: storage.get_trial(trial_id),
        "waiting": lambda: storage.get_all_trials(study_id, states=(TrialState.WAITING,)),
        "complete, with news": lambda: storage.get_all_trials(study_id, states=complete),
        "complete, without": lambda: storage.get_all_trials(study_id, states=complete),
        "all": lambda: storage.get_all_trials(study_id),
        "state": lambda: storage.set_trial_state_values(trial_id, TrialState.COMPLETE, [1.0]),
        "study attr": lambda: storage.set_study_user_attr(study_id, "a", 1),
        "study attrs": lambda: storage.get_study_user_attrs(study_id),
        "studies": storage.get_all_studies,
    }
    storage.get_all_trials(study_id)
    counts = {name: sent_by(call)[0] for name, call in calls.items()}
    assert counts == dict.fromkeys(calls, 1) | {"complete, with news": 2}


def test_reading_finished_trials_reads_no_running_ones(
    storage: PostgresStorage, other: PostgresStorage, study_id: int
) -> None:
    running = [create_trial(state=TrialState.RUNNING, user_attrs={"a": n}) for n in range(20)]
    ids = other.import_trials(study_id, running)
    complete = (TrialState.COMPLETE,)
    assert storage.get_all_trials(study_id, states=complete) == []
    fetched = []

    def note(_c: object, cursor: object, *_: object) -> None:
        fetched.append(cursor.rowcount)  # type: ignore[attr-defined]

    sa.event.listen(storage.engine, "after_cursor_execute", note)
    for trial_id in ids[:2]:
        other.set_trial_state_values(trial_id, TrialState.COMPLETE, [1.0])
    assert len(storage.get_all_trials(study_id, states=complete)) == 2
    assert len(storage.get_all_trials(study_id, states=complete)) == 2
    assert fetched == [2, 2, 1]  # which have finished, these, nothing new


def test_recently_read_finished_trials_are_not_queried_again(
    storage: PostgresStorage, other: PostgresStorage, study_id: int
) -> None:
    complete = (TrialState.COMPLETE,)
    assert storage.get_finished_trials(study_id, complete, max_age=3600) == []
    (trial_id,) = other.import_trials(study_id, [create_trial(value=1.0)])
    with statements(storage) as sent:
        assert storage.get_finished_trials(study_id, complete, max_age=3600) == []
    assert sent == []
    (found,) = storage.get_finished_trials(study_id, complete)
    assert found._trial_id == trial_id
    other.import_trials(study_id, [create_trial(value=2.0)])
    storage.get_all_trials(study_id)
    assert len(storage.get_finished_trials(study_id, [*complete, TrialState.RUNNING], max_age=3600)) == 2
    with pytest.raises(KeyError):
        storage.get_finished_trials(study_id + 1, complete)


def test_a_trial_takes_few_statements_through_the_public_interface(storage: PostgresStorage, study_id: int) -> None:
    storage.import_trials(
        study_id, [create_trial(value=n, params={"x": n / 50}, distributions={"x": X}) for n in range(50)]
    )
    study = optuna.load_study(study_name="s", storage=storage, pruner=optuna.pruners.MedianPruner())

    def run() -> None:
        trial = study.ask()
        trial.suggest_float("x", 0, 1)
        for step in range(10):
            trial.report(1.0, step)
            trial.should_prune()
        study.tell(trial, 1.0)

    run()
    with statements(storage) as sent:
        run()
    # ask 3, the sampler's two looks and its attribute, the parameter, 10 x (report, look), tell 2; and the trial
    # before, which this process finished, is read
    assert len(sent) <= 3 + 2 + 1 + 1 + 20 + 2 + 1
