"""Trials wait at rungs while workers die between any two steps: each promotion happens once, as without faults."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.faults.breakable import Breakable
from tests.faults.harness import Arena
from tests.faults.invariants import assert_equals_undisturbed, assert_tracked, read_promotions, read_trials
from tests.faults.orders import Order
from tests.faults.pruning.killed import kills
from tests.waiting import wait_for

pytestmark = [pytest.mark.faults, pytest.mark.xdist_group("engines")]

ASHA = "--pruner asha --pruner-option reduction_factor=2"  # rungs after the first and second of four epochs
N_TRIALS = 6

Undisturbed = Callable[[int], list[list[float]]]


@pytest.mark.soak
def test_a_kill_at_every_step_between_report_and_promotion_changes_no_result(
    arena: Arena, undisturbed: Undisturbed
) -> None:
    """One worker after the other, so that decisions are made in one order: they are those of the quiet study."""
    quiet = arena.make_quiet_arena()
    quiet.create(N_TRIALS, [], settings=ASHA)
    quiet.work(1)
    expected = assert_equals_undisturbed(quiet.storage_url, quiet.name, quiet.home, undisturbed(N_TRIALS), N_TRIALS)
    orders, outcomes = kills(quiet, expected)
    arena.create(N_TRIALS, orders, settings=ASHA, retries=5)
    arena.work(1)
    missed = [order for index, order in enumerate(orders) if not arena.has_obeyed(index)]
    assert not missed, f"no worker was killed at {missed}"
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(N_TRIALS), N_TRIALS)
    assert [t.outcomes for t in trials] == outcomes
    assert [(t.state, t.values, t.value) for t in trials] == [(t.state, t.values, t.value) for t in expected]
    made, wanted = (read_promotions(each.storage_url, each.name, 2) for each in (arena, quiet))
    assert made == wanted
    assert_tracked(arena.tracking_uri, arena.name, trials)


@pytest.mark.soak
def test_frozen_workers_promote_no_trial_after_they_wake_up(arena: Arena, undisturbed: Undisturbed) -> None:
    """Workers freeze before and after they reach a rung. Meanwhile other workers take and continue their trials."""
    points = [("reach rung", "before"), ("reach rung", "after"), ("report", "after")]
    orders = [Order(point, "freeze", trial=number, when=when) for number, (point, when) in enumerate(points)]
    arena.create(N_TRIALS, orders, settings=ASHA)

    arena.work(2, meanwhile=arena.replace_frozen_workers)
    late = arena.list_frozen_workers()
    assert len(late) == len(points)
    before = [(t.state, t.values, t.attempts) for t in read_trials(arena.storage_url, arena.name)]
    for worker in late:
        worker.send(signal.SIGCONT)
    wait_for(lambda: arena.poll_workers() or all(worker.ended for worker in late), "the frozen workers to leave")
    assert {worker.exit_code for worker in arena.workers} == {0}, arena.describe_failure("not all left in peace")
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(N_TRIALS), N_TRIALS)
    assert [(t.state, t.values, t.attempts) for t in trials] == before
    read_promotions(arena.storage_url, arena.name, 2)


@pytest.mark.soak
def test_a_kill_of_postgres_while_a_trial_reaches_a_rung_and_one_is_promoted(
    broken_arena: Arena, breakable: Breakable, undisturbed: Undisturbed
) -> None:
    arena = broken_arena
    orders = [Order("reach rung", "hang", trial=2), Order("reach rung", "hang", trial=3)]
    arena.create(N_TRIALS, orders, settings=ASHA)
    workers = [arena.start() for _ in range(2)]
    wait_for(lambda: arena.has_obeyed(0) and arena.has_obeyed(1), "the workers to come to a rung")
    breakable.away_for_longer_than_a_lease(arena, workers)
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(N_TRIALS), N_TRIALS)
    assert not [t.number for t in trials if "lost" in t.outcomes]
    read_promotions(arena.storage_url, arena.name, 2)


@pytest.mark.soak
def test_a_stopped_study_continues_with_its_waiting_trials(arena: Arena, undisturbed: Undisturbed) -> None:
    arena.create(N_TRIALS, [Order("training", "hang", trial=4, epoch=0)], settings=ASHA)
    worker = arena.start()
    wait_for(lambda: arena.has_obeyed(0), "some trials to wait")
    waiting = [t.number for t in read_trials(arena.storage_url, arena.name) if t.state == "WAITING"]
    assert waiting
    arena.run("stop", arena.name)
    (arena.orders / "open").touch()
    wait_for(lambda: arena.poll_workers() or worker.ended, "the worker to leave")
    states = {t.number: t.state for t in read_trials(arena.storage_url, arena.name)}
    assert {states[number] for number in waiting} <= {"WAITING"}
    shown = arena.run("show", arena.name)
    assert "paused at rung 0, epoch 1, with rank" in " ".join(shown.split()), shown
    arena.run("start", arena.name)
    arena.work(1)
    assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(N_TRIALS), N_TRIALS)
    read_promotions(arena.storage_url, arena.name, 2)
