"""Random faults in searches with folds and with population-based training: the results equal those without faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpsearch.storage.attributes import CONFIG_SCHEDULE
from hpsearch.storage.rungs.generations import read_generations
from hpsearch.storage.study_storage.storage import open_storage
from hpsearch.storage.trials.history import read_fold_values
from tests.faults.breakable import Breakable
from tests.faults.harness import OBJECTIVE, Arena, wire
from tests.faults.invariants import assert_attempts, assert_files, read_trials
from tests.faults.soak import CODES, Storm
from tests.waiting import PATIENCE, wait_for

pytestmark = [pytest.mark.soak, pytest.mark.faults, pytest.mark.xdist_group("trainings")]

STACKED = str(Path(__file__).with_name("stacked.py"))
FAULTS = 34  # more than 100 in the three searches
PBT = "--pruner pbt --pruner-option interval=1 --pruner-option quantile=0.34"


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("objective", "settings", "n_trials"),
    [(OBJECTIVE, "--folds 3", 24), (STACKED, "--folds 3", 12), (OBJECTIVE, PBT, 18)],
    ids=["folds", "folds as one model", "pbt"],
)
def test_random_faults_change_no_bit(
    broken_arena: Arena, breakable: Breakable, objective: str, settings: str, n_trials: int
) -> None:
    quiet = broken_arena.make_quiet_arena()
    quiet.create(n_trials, [], settings=settings, objective=objective)
    quiet.work(1, patience=10 * PATIENCE)
    is_stacked = "folds train as one vectorized model" in "".join(each.log.read_text() for each in quiet.workers)
    assert is_stacked == (objective == STACKED)
    with wire(broken_arena.tracking_uri) as (line, broken_arena.tracking_uri):
        broken_arena.create(n_trials, [], settings=settings, objective=objective, retries=1000)
        storm = Storm(broken_arena, breakable, line, seed=1, period=0.3, most=FAULTS)
        try:
            more = {"PACE": "0.1", "HPSEARCH_SAVE_EVERY": "0.1"}
            broken_arena.work(3, meanwhile=storm, codes=CODES, patience=10 * PATIENCE, **more)
        finally:
            storm.calm()
        wait_for(lambda: broken_arena.poll_workers() or all(w.ended for w in broken_arena.workers), "the last workers")
        assert "no unsent records are left\n" in broken_arena.run("sync", broken_arena.name)
    print(dict(storm.done))
    assert storm.done.total() == FAULTS
    assert storm.done.keys() >= {"kill", "freeze", "cut connections"}
    assert read_study(broken_arena) == read_study(quiet)
    trials = read_trials(broken_arena.storage_url, broken_arena.name)
    epochs = 5 if objective == STACKED else 4
    assert [(trial.state, len(trial.values)) for trial in trials] == [("COMPLETE", epochs)] * n_trials
    for trial in trials:
        assert_attempts(trial)
    assert_files(broken_arena.home, broken_arena.home / "checkpoints", trials)
    quiet.close()


def read_study(arena: Arena) -> list[Any]:
    """Return the values, folds, schedules and decisions of a study."""
    storage = open_storage(arena.storage_url, application_name="test")
    study_id = storage.get_study_id_from_name(arena.name)
    trials = storage.get_all_trials(study_id)
    found: list[Any] = [
        (t.state, t.value, t.params, t.intermediate_values, t.user_attrs.get(CONFIG_SCHEDULE)) for t in trials
    ]
    folds = [read_fold_values(storage.engine, trial._trial_id) for trial in trials]
    return [*found, *folds, *read_generations(storage.engine, study_id)]
