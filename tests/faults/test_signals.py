"""Workers that shut down gracefully or are killed before that, and user code that fails in every possible way."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.faults.harness import Arena
from tests.faults.invariants import assert_equals_undisturbed, read_trials
from tests.faults.orders import Order
from tests.waiting import wait_for

pytestmark = [pytest.mark.faults, pytest.mark.xdist_group("faults")]


def test_a_worker_completes_its_epoch_after_sigterm_or_is_killed_in_it(
    arena: Arena, undisturbed: Callable[[int], list[list[float]]]
) -> None:
    """Trial 0's worker can complete its epoch. Trial 1's worker is killed before its epoch ends."""
    arena.create(2, [Order("training", "hang", trial=number, epoch=1) for number in range(2)])
    workers = []
    for number in range(2):
        workers.append(arena.start())
        wait_for(lambda: arena.has_obeyed(number), "the worker to be in mid-epoch")  # noqa: B023 called at once
    for worker in workers:
        worker.send(signal.SIGTERM)
        wait_for(lambda: "finishing the epoch" in worker.log.read_text(), "the worker to handle the signal")  # noqa: B023 called at once
    workers[1].send(signal.SIGKILL)
    wait_for(lambda: arena.poll_workers() or workers[1].ended, "the worker to be killed")
    (arena.orders / "open").touch()
    wait_for(lambda: arena.poll_workers() or workers[0].ended, "the worker to leave")
    assert workers[0].exit_code == 128 + 15
    given_back, orphan = read_trials(arena.storage_url, arena.name)
    assert (given_back.state, sorted(given_back.values)) == ("WAITING", [0, 1]), "the epoch was ended"
    assert sorted(orphan.values) == [0]
    arena.work(1)
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(2), 2)
    assert [t.outcomes for t in trials] == [["released", "complete"], ["lost", "complete"]]


def test_a_worker_that_starts_a_trial_exits_at_sigterm_without_waiting_for_user_code(
    arena: Arena, undisturbed: Callable[[int], list[list[float]]]
) -> None:
    arena.create(1, [Order("suggest", "hang", trial=0)])
    worker = arena.start()
    wait_for(lambda: arena.has_obeyed(0), "the worker to be in user code")
    worker.send(signal.SIGTERM)
    wait_for(lambda: arena.poll_workers() or worker.ended, "the worker to leave")
    assert worker.exit_code == 128 + 15, arena.describe_failure("")
    assert "stopped before the training" in worker.log.read_text()
    (given_back,) = read_trials(arena.storage_url, arena.name)
    assert (given_back.state, given_back.outcomes) == ("WAITING", ["released"])
    arena.work(1)
    (trial,) = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(1), 1)
    assert trial.outcomes == ["released", "complete"]


def test_a_worker_that_retrains_reported_epochs_stops_at_sigterm(
    arena: Arena, undisturbed: Callable[[int], list[list[float]]]
) -> None:
    """Its checkpoints are gone: it starts from scratch, and exits although the study has its next epochs already."""
    arena.create(
        1, [Order("training", "kill", trial=0, epoch=3), Order("training", "hang", trial=0, attempt=2, epoch=0)]
    )
    dead = arena.start()
    wait_for(lambda: arena.poll_workers() or dead.ended, "the worker to be killed")
    for kept in (arena.home / "checkpoints").glob("*/0000/*.pt"):
        kept.unlink()
    for left in (arena.home / "runs").glob("*/0000*/*.pt"):
        left.unlink()
    again = arena.start()
    wait_for(lambda: arena.has_obeyed(1), "the worker to be in its first epoch")
    again.send(signal.SIGTERM)
    wait_for(lambda: "finishing the epoch" in again.log.read_text(), "the worker to handle the signal")
    (arena.orders / "open").touch()
    wait_for(lambda: arena.poll_workers() or again.ended, "the worker to leave")
    assert [e["epoch"] for e in arena.events("training") if e["attempt"] == 2] == [0]
    arena.work(1)
    (trial,) = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(1), 1)
    assert trial.outcomes == ["lost", "released", "complete"]


def test_a_failure_of_user_code_ends_only_its_trial(
    arena: Arena, undisturbed: Callable[[int], list[list[float]]]
) -> None:
    actions = [("raise", "FAIL"), ("exit", "FAIL"), ("allocate", "PRUNED"), ("input/output error", "FAIL")]
    orders = [Order("training", action, trial=2 * n + 1, epoch=1) for n, (action, _) in enumerate(actions)]
    n_trials = 2 * len(actions) + 1
    arena.create(n_trials, orders)
    arena.work(1)
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(n_trials), n_trials)
    assert [t.state for t in trials[1::2]] == [state for _, state in actions]
    assert {t.state for t in trials[::2]} == {"COMPLETE"}
    assert all(len(t.attempts) == 1 for t in trials)


def test_a_trial_that_kills_its_workers_fails_without_harm_to_others(
    arena: Arena, undisturbed: Callable[[int], list[list[float]]]
) -> None:
    arena.create(3, [Order("training", "kill", trial=1, attempt=0, epoch=1)], retries=0)
    arena.work(2)
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(3), 3)
    assert [t.state for t in trials] == ["COMPLETE", "FAIL", "COMPLETE"]
    assert trials[1].outcomes == ["lost"] * 4
