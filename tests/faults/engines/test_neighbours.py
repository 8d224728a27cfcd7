"""Workers that share machines with others: they exit if there is no work for them, and if they hang."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.faults.harness import Arena
from tests.faults.invariants import assert_equals_undisturbed, read_trials
from tests.faults.orders import Order
from tests.waiting import wait_for

pytestmark = [pytest.mark.faults, pytest.mark.xdist_group("engines")]

Undisturbed = Callable[[int], list[list[float]]]


def worker(arena: Arena, *options: str) -> tuple[str, ...]:
    return ("worker", "--study", arena.name, *options)


@pytest.mark.soak
def test_a_worker_exits_if_only_other_workers_have_trials(arena: Arena, undisturbed: Undisturbed) -> None:
    arena.create(1, [Order("training", "hang", trial=0, epoch=1)])
    first = arena.start()
    wait_for(lambda: arena.has_obeyed(0), "the first worker to be in mid-epoch")
    said = arena.run(*worker(arena, "--idle-timeout", "0.5"))
    assert "while other workers run 1 trials; exiting" in said
    assert not first.ended
    (arena.orders / "open").touch()
    wait_for(lambda: arena.poll_workers() or first.ended, "the first worker to end")
    assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(1), 1)


def test_a_worker_exits_after_n_trials_with_the_code_for_remaining_work(arena: Arena) -> None:
    arena.create(3, [])
    arena.run(*worker(arena, "--max-trials", "2"), code=128 + 15)
    assert [trial.state for trial in read_trials(arena.storage_url, arena.name)] == ["COMPLETE"] * 2
    arena.run(*worker(arena, "--max-trials", "1"))
    assert [trial.state for trial in read_trials(arena.storage_url, arena.name)] == ["COMPLETE"] * 3


def test_a_worker_claims_no_trial_after_its_time_limit(arena: Arena) -> None:
    arena.create(1, [])
    arena.run(*worker(arena, "--max-time", "0"), code=128 + 15)
    assert read_trials(arena.storage_url, arena.name) == []


def test_a_hanging_worker_logs_its_stack_and_exits_and_its_trial_is_resumed(
    arena: Arena, undisturbed: Undisturbed
) -> None:
    """The worker releases the lease, and the attempt counts as lost, so that a trial that always hangs fails."""
    arena.create(1, [Order("training", "hang", trial=0, epoch=1)], retries=1)
    first = arena.start(*worker(arena, "--stall-factor", "3"), STALL_LEAST="1", HPSEARCH_LEASE="600")
    wait_for(lambda: arena.poll_workers() or first.ended, "the worker to end itself")
    log = first.log.read_text()
    assert first.exit_code == 1, "it may be started again"
    assert "longest pause before" in log
    assert 'orders.py", line' in log, "the stack of the hanging call"
    arena.work(1)
    (trial,) = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(1), 1)
    assert trial.outcomes == ["lost", "complete"]


@pytest.mark.soak
def test_a_worker_touches_its_progress_file(arena: Arena) -> None:
    arena.create(1, [Order("training", "hang", trial=0, epoch=1)])
    alive = arena.folder / "probe" / "alive"
    first = arena.start(*worker(arena, "--heartbeat", str(alive)))
    wait_for(lambda: arena.has_obeyed(0), "the worker to be in mid-epoch")
    touched = alive.stat().st_mtime_ns
    wait_for(lambda: time.time_ns() > touched + 1_100_000_000, "the next touch to be due")
    (arena.orders / "open").touch()
    wait_for(lambda: arena.poll_workers() or first.ended, "the worker to end")
    assert alive.stat().st_mtime_ns > touched


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--save-every", "0"), "--save-every must be above 0, not 0.0"),
        (("--stall-factor", "1"), "--stall-factor must be above 1, not 1.0"),
        (("--save-every", "nan"), "--save-every must be a finite number, not nan"),
    ],
)
def test_impossible_worker_options_are_rejected(arena: Arena, options: tuple[str, ...], message: str) -> None:
    arena.create(1, [])
    assert message in arena.run(*worker(arena, *options), code=2)


def test_the_final_exit_code_is_configurable(arena: Arena) -> None:
    """For engines that restart a worker on every code except one. Codes that are not final stay the same."""
    arena.create(3, [])
    final = ("--final-exit-code", "0")
    assert "no study 'nosuch'" in arena.run("worker", "--study", "nosuch", *final)
    arena.run(*worker(arena, "--max-trials", "1", *final), code=128 + 15)
