"""Workers that are killed while they train the folds of a trial: the trial resumes exactly."""

from __future__ import annotations

import pytest

from hpsearch.storage.study_storage.storage import open_storage
from hpsearch.storage.trials.history import read_fold_values
from tests.faults.harness import Arena
from tests.faults.invariants import read_trials
from tests.faults.orders import Order

pytestmark = [pytest.mark.faults, pytest.mark.xdist_group("trainings")]

FOLDS = "--folds 3"
STEPS = 6  # of an epoch of all folds: 2 of each


@pytest.mark.parametrize("save_every", [None, pytest.param("1e-6", marks=pytest.mark.soak)])
def test_a_trial_that_is_killed_in_any_fold_changes_no_bit(arena: Arena, save_every: str | None) -> None:
    quiet = arena.make_quiet_arena()
    quiet.create(2, [], settings=FOLDS)
    quiet.work(1)
    kills = [("training", 0, 5), ("report", 0, 1), ("training", 2, STEPS), ("write checkpoint file", 3, 1)]
    orders = [
        Order(point, "kill", trial=0, attempt=attempt, epoch=epoch, nth=nth)
        for attempt, (point, epoch, nth) in enumerate(kills, start=1)
    ]
    arena.create(2, orders, settings=FOLDS, retries=10)
    arena.work(2, **({} if save_every is None else {"HPSEARCH_SAVE_EVERY": save_every}))
    found, expected = read_trials(arena.storage_url, arena.name), read_trials(quiet.storage_url, quiet.name)
    assert [(trial.state, trial.value, trial.values) for trial in found] == [
        (trial.state, trial.value, trial.values) for trial in expected
    ]
    assert read_folds(arena) == read_folds(quiet)
    assert all(len(folds) == 3 for epochs in read_folds(arena) for folds in epochs.values())
    assert found[0].outcomes == ["lost"] * len(kills) + ["complete"]
    assert all(trial.state == "COMPLETE" and len(trial.values) == 4 for trial in found)
    quiet.close()


def read_folds(arena: Arena) -> list[dict[int, list[float]]]:
    """Return the values of the folds by epoch, for each trial."""
    storage = open_storage(arena.storage_url, application_name="test")
    trials = storage.get_all_trials(storage.get_study_id_from_name(arena.name))
    return [read_fold_values(storage.engine, trial._trial_id) for trial in trials]
