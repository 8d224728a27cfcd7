"""What engines do to workers (Slurm, Kubernetes, Ray): signals to all processes of a job, once and again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.faults.harness import Arena, wait_for
from tests.faults.invariants import assert_whole, read_trials
from tests.faults.orders import Order

pytestmark = [pytest.mark.faults, pytest.mark.xdist_group("faults")]

LOADING = str(Path(__file__).with_name("loading.py"))


@pytest.mark.parametrize(("objective", "passing"), [("Loading", {"epoch": 1}), ("OwnLoop", {"nth": 2})])
def test_a_signal_to_a_whole_job_ends_no_loader(
    arena: Arena, undisturbed: Callable[[int], list[list[float]]], objective: str, passing: dict[str, int]
) -> None:
    """The worker's processes are told with it, and go on: the epoch is ended, the trial given back."""
    arena.create(1, [Order("training", "hang", trial=0, **passing)], objective=f"{LOADING}:{objective}")
    worker = arena.start()
    wait_for(lambda: arena.obeyed(0), "the worker to be in mid-epoch")
    assert len(psutil.Process(worker.pid).children()) >= 2, "it has loaders"
    for number in (signal.SIGTERM, signal.SIGINT):
        os.killpg(worker.pid, number)
    wait_for(lambda: "ending the epoch" in worker.log.read_text(), "the worker to be told")
    (arena.orders / "open").touch()
    wait_for(lambda: arena.reap() or worker.ended, "the worker to leave")
    assert worker.exit_code == 128 + 15, arena.tell("it was not told to go")
    (given_back,) = read_trials(arena.storage_url, arena.name)
    assert (given_back.state, sorted(given_back.values)) == ("WAITING", [0, 1]), "the epoch was ended"
    arena.work(1)
    if objective == "Loading":
        (trial,) = assert_whole(arena.storage_url, arena.name, arena.home, undisturbed(1), 1)
    else:
        (trial,) = read_trials(arena.storage_url, arena.name)
        assert [trial.values[epoch] / trial.values[0] for epoch in range(4)] == pytest.approx([1, 2, 3, 4], rel=0.1)
    assert trial.outcomes == ["released", "complete"]


def test_loaders_of_a_killed_worker_are_gone(arena: Arena) -> None:
    """Also while they load, which takes these two for ever."""
    arena.create(1, [Order("loading", "hang", trial=0)], objective=f"{LOADING}:OwnLoop")
    worker = arena.start()
    wait_for(lambda: arena.obeyed(0), "a loader to load")
    loaders = psutil.Process(worker.pid).children()
    assert loaders
    worker.send(signal.SIGKILL)
    wait_for(lambda: not any(one.is_running() for one in loaders), "the loaders to be gone")


def test_preemptions_cost_no_retries_while_a_trial_gets_on(
    arena: Arena, undisturbed: Callable[[int], list[list[float]]]
) -> None:
    """Trial 0 is preempted in each of its epochs, and once more; trial 1 never gets beyond its second."""
    preempted = [
        Order("training", action, trial=0, attempt=attempt, epoch=min(attempt, 3), nth=nth)
        for attempt in range(1, 5)
        for nth, action in enumerate(["terminate", "kill"], start=1)
    ]
    arena.create(2, [*preempted, Order("training", "kill", trial=1, attempt=0, epoch=1)], retries=2)
    arena.work(1)
    trials = assert_whole(arena.storage_url, arena.name, arena.home, undisturbed(2), 2)
    assert [trial.state for trial in trials] == ["COMPLETE", "FAIL"]
    assert [trial.outcomes for trial in trials] == [["lost"] * 4 + ["complete"], ["lost"] * 3]
