"""Workers that are stopped or killed in epochs that take longer than the grace period."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
import sqlalchemy as sa

from hpsearch import Trainer
from hpsearch.search.samplers.optuna import Random
from hpsearch.search.samplers.suggest import derive_seed, make_sampler
from tests.faults.engines.loading import Longer
from tests.faults.harness import Arena, Worker
from tests.faults.invariants import assert_equals_undisturbed, read_trials
from tests.faults.orders import Order
from tests.faults.scripted import EPOCHS
from tests.waiting import wait_for

pytestmark = [pytest.mark.faults, pytest.mark.xdist_group("engines")]

Undisturbed = Callable[[int], list[list[float]]]
STEPS = 12  # per trial; three per epoch
NO_TIME = {"HPSEARCH_GRACE": "0"}
OFTEN = {"HPSEARCH_SAVE_EVERY": "1e-6"}  # minutes: a checkpoint is due after each step
SLOW = {"STEP_PACE": "0.06"}  # seconds: longer than the session's polling interval


def steps_of(arena: Arena) -> Counter[tuple[int, int]]:
    """Return how often each step of each trial was trained."""
    return Counter((event["trial"], event["step"]) for event in arena.events("step"))


def failures(arena: Arena) -> int:
    engine = sa.create_engine(arena.storage_url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        lost = sa.text("SELECT count(*) FROM hpsearch_attempts WHERE outcome IN ('lost', 'failed')")
        return int(connection.execute(lost).scalar_one())


@pytest.mark.parametrize("epoch", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_an_epoch_that_exceeds_the_grace_period_is_saved_mid_epoch(
    arena: Arena, undisturbed: Undisturbed, epoch: int
) -> None:
    arena.create(1, [Order("training", "hang", trial=0, epoch=epoch, nth=2)], retries=0)
    worker = arena.start(**NO_TIME, **SLOW)
    wait_for(lambda: arena.has_obeyed(0), "the worker to be in mid-epoch")
    worker.send(signal.SIGTERM)
    wait_for(lambda: "finishing the epoch or saving" in worker.log.read_text(), "the worker to handle the signal")
    (arena.orders / "open").touch()
    wait_for(lambda: arena.poll_workers() or worker.ended, "the worker to leave")
    assert worker.exit_code == 128 + 15
    (given_back,) = read_trials(arena.storage_url, arena.name)
    assert (given_back.state, given_back.outcomes) == ("WAITING", ["released"])
    assert len(given_back.values) == epoch, "nothing of the epoch was reported"
    assert any(f"/{epoch:04d}.2-1.pt" in path for path in given_back.pointers), given_back.pointers
    arena.work(1, **SLOW)
    assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(1), 1)
    assert set(steps_of(arena).values()) == {1}, "no step was trained twice"
    assert f"trial 0: released after epoch {epoch} and 2 steps\n" in worker.log.read_text()
    assert f"trial 0: resuming after epoch {epoch} and 2 steps" in arena.workers[-1].log.read_text()


@pytest.mark.soak  # the test above stops a worker once
def test_a_fleet_that_is_stopped_three_times_trains_no_step_twice(arena: Arena, undisturbed: Undisturbed) -> None:
    arena.create(6, [], retries=0)
    signalled = []

    def meanwhile(running: list[Worker]) -> None:
        # Only while all workers train: a worker that is stopped before its first step shows nothing.
        done = len(arena.events("step"))
        if len(signalled) < 3 and done >= 20 * (len(signalled) + 1):
            signalled.append(done)
            for worker in running:
                worker.send(signal.SIGTERM)

    arena.work(4, meanwhile=meanwhile, codes=(128 + 15,), **NO_TIME, **SLOW)
    assert len(signalled) == 3
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(6), 6)
    assert {trial.state for trial in trials} == {"COMPLETE"}
    assert sum("released" in trial.outcomes for trial in trials) >= 3, (
        "some trials were released in the middle of an epoch"
    )
    found = steps_of(arena)
    assert set(found.values()) == {1}, [step for step, times in found.items() if times > 1]
    assert len(found) == 6 * STEPS


@pytest.mark.soak
def test_a_long_epoch_has_periodic_mid_epoch_checkpoints(arena: Arena, undisturbed: Undisturbed) -> None:
    """Each attempt except the last is killed at its second step. `retries` 1 suffices, because each makes progress."""
    kills = [Order("training", "kill", trial=0, attempt=attempt, nth=2) for attempt in range(1, 6)]
    arena.create(1, kills, retries=1)
    arena.work(1, **OFTEN, **SLOW)
    (trial,) = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(1), 1)
    assert trial.outcomes == ["lost"] * 5 + ["complete"]
    assert steps_of(arena) == {(0, step): 1 for step in range(1, STEPS + 1)}, "a step that was killed was not taken"


KILLED = [
    ("record mid-epoch checkpoint", "before"),
    ("record mid-epoch checkpoint", "after"),
    ("write checkpoint file", "before"),
    ("write checkpoint file", "after"),
    ("upload checkpoint", "after"),
]


@pytest.mark.soak
def test_a_kill_at_each_step_of_a_mid_epoch_checkpoint_changes_no_result(
    arena: Arena, undisturbed: Undisturbed
) -> None:
    orders = [
        Order(point, "kill", trial=number, when=when, epoch=1, nth=2) for number, (point, when) in enumerate(KILLED)
    ]
    arena.create(len(orders), orders, retries=1)
    arena.work(2, **OFTEN, **SLOW)
    assert all(arena.has_obeyed(index) for index in range(len(orders)))
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(len(orders)), len(orders))
    assert [trial.outcomes for trial in trials] == [["lost", "complete"]] * len(orders)


@pytest.mark.soak
def test_a_worker_that_froze_before_a_mid_epoch_checkpoint_writes_nothing(
    arena: Arena, undisturbed: Undisturbed
) -> None:
    orders = [
        Order("record mid-epoch checkpoint", "freeze", trial=0, epoch=1, nth=2),
        Order("training", "hang", trial=0, attempt=2, epoch=2),
    ]
    arena.create(1, orders)

    def replace(running: list[Worker]) -> None:
        arena.replace_frozen_workers(running, **OFTEN, **SLOW)
        if arena.has_obeyed(1) and not (arena.orders / "open").exists():
            (first,) = arena.list_frozen_workers()
            first.send(signal.SIGCONT)
            wait_for(lambda: "stops working on it" in first.log.read_text(), "the frozen worker to let go of its trial")
            (arena.orders / "open").touch()

    arena.work(1, meanwhile=replace, **OFTEN, **SLOW)
    wait_for(lambda: arena.poll_workers() or all(worker.ended for worker in arena.workers), "all to leave")
    (trial,) = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(1), 1)
    assert trial.outcomes == ["lost", "complete"]


@pytest.mark.soak
def test_a_grace_period_of_ten_seconds_suffices_for_an_epoch_of_a_minute(arena: Arena) -> None:
    """The next worker claims the trial within 15 s after the signal and resumes at the step."""
    objective = Longer()
    sampled = optuna.create_study(sampler=make_sampler(Random(), study_seed=0, trial_number=0, epochs=1))
    config, seed = objective.configure(sampled.ask()), derive_seed(0, "trial", 0)
    alone = Trainer(objective, config, epochs=EPOCHS, seed=seed, split_seed=0, device="cpu").fit()

    arena.create(1, [], objective=f"{Path(__file__).with_name('loading.py')}:Longer", retries=0)
    worker = arena.start(STEP_PACE=str(60 / 26), HPSEARCH_GRACE="10")
    wait_for(lambda: len(arena.events("step")) >= 3, "some steps")
    worker.send(signal.SIGTERM)
    signalled = time.monotonic()
    wait_for(lambda: arena.poll_workers() or worker.ended, "the worker to leave")
    arena.work(1, STEP_PACE="0")
    assert (worker.exit_code, failures(arena)) == (128 + 15, 0)
    claimed = [event["at"] for event in arena.events("claimed") if event["pid"] == arena.workers[-1].pid]
    assert claimed[0] - signalled < 15
    (trial,) = read_trials(arena.storage_url, arena.name)
    assert trial.values == {record.epoch: record.metrics["val_loss"] for record in alone.history}
    assert set(steps_of(arena).values()) == {1}
