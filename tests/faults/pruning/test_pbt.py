"""Population-based training while workers die or freeze: each decision is made once, as without faults."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from hpsearch.storage.attributes import CONFIG_SCHEDULE
from hpsearch.storage.rungs.generations import Generation, read_generations
from hpsearch.storage.study_storage.storage import open_storage
from tests.faults.harness import Arena, Worker
from tests.faults.invariants import assert_attempts, assert_files, read_trials
from tests.faults.orders import Order
from tests.waiting import wait_for

pytestmark = [pytest.mark.faults, pytest.mark.xdist_group("engines")]

PBT = "--pruner pbt --pruner-option interval=1 --pruner-option quantile=0.34"  # three generations in four epochs
N_TRIALS = 6  # two copies per generation

# The points at which the attempts of a trial are killed, in their order. A trial that has reached the end of a
# generation, or whose claim was not committed, loses no attempt. The first claim after a generation also decides it.
KILLED = [
    [("report", "before"), ("reach rung", "before"), ("reach rung", "after"), ("write claim", "after")],
    [("upload checkpoint", "after"), ("reach rung", "after"), ("claim", "after"), ("restore checkpoint", "after")],
    [None, ("fetch checkpoint", "after"), ("remove superseded checkpoints", "before"), ("report", "after")],
    [None, ("restore checkpoint", "before"), ("restore checkpoint", "after"), ("reach rung", "after")],
    [None, ("claim", "after"), ("remove superseded checkpoints", "after"), ("report", "before")],
    [None, ("fetch checkpoint", "after"), ("upload checkpoint", "after"), ("remove checkpoints", "before")],
]


@pytest.mark.soak
def test_a_kill_at_every_step_around_a_decision_changes_no_result(arena: Arena) -> None:
    quiet = make_quiet_twin(arena)
    orders = [
        Order(point[0], "kill", trial=number, attempt=attempt, when=point[1])
        for number, points in enumerate(KILLED)
        for attempt, point in enumerate(points, start=1)
        if point is not None and point[0] != "remove checkpoints"
    ]
    arena.create(N_TRIALS, orders, settings=PBT, retries=10)
    arena.work(2)
    missed = [order for index, order in enumerate(orders) if not arena.has_obeyed(index)]
    assert not missed, f"no worker was killed at {missed}"
    assert_equals_twin(arena, quiet)


@pytest.mark.soak
def test_frozen_workers_change_no_generation_after_they_wake_up(arena: Arena) -> None:
    quiet = make_quiet_twin(arena)
    points = [("reach rung", "before"), ("reach rung", "after"), ("report", "after"), ("upload checkpoint", "after")]
    orders = [Order(point, "freeze", trial=number, attempt=2, when=when) for number, (point, when) in enumerate(points)]
    arena.create(N_TRIALS, orders, settings=PBT, retries=10)

    arena.work(2, meanwhile=arena.replace_frozen_workers)
    late = arena.list_frozen_workers()
    assert len(late) == len(points)
    before = read_study(arena)
    for worker in late:
        worker.send(signal.SIGCONT)
    wait_for(lambda: arena.poll_workers() or all(worker.ended for worker in late), "the frozen workers to leave")
    assert read_study(arena) == before
    assert_equals_twin(arena, quiet)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_random_kills_change_no_result(arena: Arena, seed: int) -> None:
    quiet = make_quiet_twin(arena)
    arena.create(N_TRIALS, [], settings=PBT, retries=1000)
    dice, killed = random.Random(seed), [0, 0]  # kills, and size of the log at the last kill

    def kill(running: list[Worker]) -> None:
        if arena.log_size() > killed[1] and dice.random() < 0.2 and killed[0] < 40:
            dice.choice(running).send(signal.SIGKILL)
            killed[:] = killed[0] + 1, arena.log_size()

    arena.work(3, meanwhile=kill)
    assert killed[0] > 5
    assert_equals_twin(arena, quiet)


@pytest.mark.soak
def test_lost_checkpoints_change_no_result(arena: Arena) -> None:
    """A trial that copied another one, and finds no checkpoint, trains its whole lineage again."""
    quiet = make_quiet_twin(arena)
    arena.create(N_TRIALS, [], settings=PBT, retries=10)
    lost = list[Path]()

    def lose_checkpoints(running: list[Worker]) -> None:
        if not lost and len(read_study(arena)[1]) >= 2 * N_TRIALS:
            for worker in running:
                worker.send(signal.SIGKILL)
            wait_for(lambda: arena.poll_workers() or all(worker.ended for worker in running), "the workers to die")
            lost.extend(arena.home.rglob("*.pt"))
            for path in lost:
                path.unlink()

    arena.work(2, meanwhile=lose_checkpoints)
    assert len(lost) >= N_TRIALS
    assert_equals_twin(arena, quiet)


def make_quiet_twin(arena: Arena) -> Arena:
    """Run the study without faults, with another number of workers."""
    quiet = arena.make_quiet_arena()
    quiet.create(N_TRIALS, [], settings=PBT)
    quiet.work(1)
    return quiet


def read_study(arena: Arena) -> tuple[list[Any], list[Generation]]:
    """Return the values, epochs and schedules of the trials, and the decisions of a study."""
    storage = open_storage(arena.storage_url, application_name="test")
    study_id = storage.get_study_id_from_name(arena.name)
    trials = storage.get_all_trials(study_id)
    found = [(t.state, t.value, t.params, t.intermediate_values, t.user_attrs.get(CONFIG_SCHEDULE)) for t in trials]
    return found, read_generations(storage.engine, study_id)


def assert_equals_twin(arena: Arena, quiet: Arena) -> None:
    found, decisions = read_study(arena)
    expected, expected_decisions = read_study(quiet)
    assert found == expected
    assert decisions == expected_decisions
    assert len(decisions) == 3 * N_TRIALS
    assert sum(each.parent is not None for each in decisions) == 3 * 2
    assert len(found) == N_TRIALS
    for each in (arena, quiet):
        trials = read_trials(each.storage_url, each.name)
        assert {trial.state for trial in trials} == {"COMPLETE"}
        assert all(sorted(trial.values) == [0, 1, 2, 3] for trial in trials), "each epoch of the budget once"
        for trial in trials:
            assert_attempts(trial)
        assert_files(each.home, each.home / "checkpoints", trials)
    quiet.close()
