"""Workers that are frozen past their lease and wake up when another worker has their trial."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.faults.harness import LEASE, Arena, Worker
from tests.faults.invariants import assert_equals_undisturbed
from tests.faults.orders import Order
from tests.waiting import wait_for

pytestmark = [pytest.mark.faults, pytest.mark.xdist_group("faults")]

# The points where a worker freezes. The database must reject its first write after it wakes up.
POINTS = [
    ("training", "before", 1),
    ("write checkpoint file", "after", 1),
    ("upload checkpoint", "before", 2),
    ("upload checkpoint", "after", 2),
    ("report", "before", 1),
    ("publish run", "before", None),
    ("record outcome", "before", None),
]


def test_frozen_workers_write_nothing_after_they_wake_up(
    arena: Arena, undisturbed: Callable[[int], list[list[float]]]
) -> None:
    """Some wake up while the trial's next attempt runs, the others after the end of the study."""
    early = len(POINTS)
    orders = [
        Order(point, "freeze", trial=number, when=when, epoch=epoch)
        for number, (point, when, epoch) in enumerate(POINTS)
    ]
    orders += [
        Order("report", "freeze", trial=early, epoch=1),
        Order("training", "hang", trial=early, attempt=2, epoch=2),
    ]
    n_trials = early + 1
    arena.create(n_trials, orders)

    def replace(running: list[Worker]) -> None:
        arena.replace_frozen_workers(running)
        if arena.has_obeyed(len(orders) - 1) and not (arena.orders / "open").exists():
            first = next(
                w for w in arena.list_frozen_workers() if str(w.pid) == (arena.orders / f"obeyed-{early}").read_text()
            )
            first.send(signal.SIGCONT)
            wait_for(lambda: "stops working on it" in first.log.read_text(), "the frozen worker to let go of its trial")
            (arena.orders / "open").touch()

    arena.work(2, meanwhile=replace)
    late = arena.list_frozen_workers()
    assert len(late) == len(POINTS)
    for worker in late:
        worker.send(signal.SIGCONT)
    wait_for(lambda: arena.poll_workers() or all(worker.ended for worker in late), "the frozen workers to leave")
    assert {worker.exit_code for worker in arena.workers} == {0}, arena.describe_failure("not all left in peace")
    assert all("stops working on it" in worker.log.read_text() for worker in late)
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(n_trials), n_trials)
    assert [t.outcomes for t in trials] == [["lost", "complete"]] * n_trials


@pytest.mark.soak
def test_a_worker_that_freezes_during_a_claim_blocks_no_other(
    arena: Arena, undisturbed: Callable[[int], list[list[float]]]
) -> None:
    """It holds the lock of all claims. The server ends its transaction, and it claims again when it wakes up."""
    arena.create(3, [Order("write claim", "freeze", trial=1, when="after")])

    arena.work(1, meanwhile=arena.replace_frozen_workers)
    (frozen,) = arena.list_frozen_workers()
    frozen.send(signal.SIGCONT)
    wait_for(lambda: arena.poll_workers() or frozen.ended, "the frozen worker to leave")
    assert {worker.exit_code for worker in arena.workers} == {0}, arena.describe_failure("not all left in peace")
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(3), 3)
    assert [t.outcomes for t in trials] == [["complete"]] * 3


@pytest.mark.soak
def test_a_lease_is_renewed_during_an_epoch_longer_than_the_lease(
    arena: Arena, undisturbed: Callable[[int], list[list[float]]]
) -> None:
    arena.create(2, [Order("training", "sleep", trial=0, epoch=1)])
    arena.work(2)
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(2), 2)
    assert [t.outcomes for t in trials] == [["complete"]] * 2
    assert (trials[0].attempts[0].ended - trials[0].attempts[0].started).total_seconds() > LEASE


@pytest.mark.soak
def test_a_wrong_clock_of_a_worker_is_harmless(arena: Arena, undisturbed: Callable[[int], list[list[float]]]) -> None:
    """Leases and times of attempts use the database's clock, so that a wrong local clock takes no trial.

    One worker's clock is an hour behind, one an hour ahead, one correct. Each trains an epoch longer than a lease.
    """
    arena.create(4, [Order("training", "sleep", trial=number, epoch=1) for number in range(3)])
    wrong = [arena.start(CLOCK_OFFSET=str(offset)) for offset in (-3600, 3600)]
    wait_for(lambda: len({event["pid"] for event in arena.events("training")}) == 2, "both to have a trial")
    arena.work(1)
    wait_for(lambda: arena.poll_workers() or all(worker.ended for worker in wrong), "the workers to leave")
    assert [worker.exit_code for worker in wrong] == [0, 0], arena.describe_failure("not all left in peace")
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(4), 4)
    assert [t.outcomes for t in trials] == [["complete"]] * 4
    times = [time for t in trials for time in (t.attempts[0].started, t.attempts[0].ended)]
    assert (max(times) - min(times)).total_seconds() < 600
