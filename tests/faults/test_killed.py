"""Workers that are killed between any two steps: each trial is taken up again, and nothing of it is lost or doubled."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.harness import Arena
from tests.faults.invariants import Trial, assert_tracked, assert_whole
from tests.faults.orders import Order

# Where the worker of each trial is killed: point, before or after, epoch, and what is to come of the trial.
POINTS: list[tuple[str, str, int | None, list[str]]] = [
    ("in claim", "after", None, ["complete"]),  # in its transaction: there is no trial yet
    ("claim", "after", None, ["lost", "complete"]),
    ("suggest", "before", None, ["lost", "complete"]),
    ("log params", "before", None, ["lost", "complete"]),
    ("training", "before", 0, ["lost", "complete"]),
    ("training", "before", 2, ["lost", "complete"]),
    ("write", "after", 1, ["lost", "complete"]),
    ("put", "before", 1, ["lost", "complete"]),
    ("put", "after", 1, ["lost", "complete"]),
    ("report", "before", 0, ["lost", "complete"]),
    ("report", "after", 1, ["lost", "complete"]),
    ("committed", "after", 2, ["lost", "complete"]),
    ("report", "after", 3, ["lost", "complete"]),
    ("publish", "before", None, ["lost", "complete"]),
    ("model", "after", None, ["lost", "complete"]),
    ("settle", "before", None, ["lost", "complete"]),
    ("settle", "after", None, ["complete"]),
    ("finish", "after", None, ["complete"]),
    ("forget", "after", None, ["complete"]),
]
TWICE = [("bring", "after"), ("restore", "after"), ("epoch", "before")]

# Where the sender, a thread of the same process, is killed with it; the trial that is trained meanwhile is lost too.
SENDING = [
    ("ship", "after"),
    ("create run", "before"),
    ("create run", "after"),
    ("note run", "after"),  # not committed yet
    ("send", "before"),
    ("send", "after"),
    ("shipped", "before"),
    ("upload", "before"),
    ("upload", "after"),
    ("create model", "before"),
    ("create model", "after"),
    ("upload model", "before"),
    ("upload model", "after"),
    ("end run", "before"),
    ("end run", "after"),
    ("delivered", "before"),
    ("delivered", "after"),
    ("drop pointers", "before"),
]

pytestmark = [pytest.mark.faults, pytest.mark.xdist_group("faults")]


def test_killed_at_every_step(arena: Arena, undisturbed: Callable[[int], list[list[float]]]) -> None:
    orders = [
        Order(point, "kill", trial=number, when=when, epoch=epoch)
        for number, (point, when, epoch, _) in enumerate(POINTS)
    ]
    # Then the worker that takes the trial up is killed as well, at its first steps.
    for extra, (point, when) in enumerate(TWICE):
        orders.append(Order("training", "kill", trial=len(POINTS) + extra, epoch=2))
        orders.append(Order(point, "kill", trial=len(POINTS) + extra, attempt=2, when=when))
    n_trials = len(POINTS) + len(TWICE)
    arena.create(n_trials, orders)
    arena.work(2)
    missed = [order for index, order in enumerate(orders) if not arena.obeyed(index)]
    assert not missed, f"nobody was killed at {missed}"
    trials = assert_whole(arena.storage_url, arena.name, arena.home, undisturbed(n_trials), n_trials)
    assert {t.state for t in trials} == {"COMPLETE"}
    outcomes = [outcomes for *_, outcomes in POINTS] + [["lost", "lost", "complete"]] * len(TWICE)
    assert [t.outcomes for t in trials] == outcomes
    assert_resumed(arena, trials)
    assert_tracked(arena.tracking_uri, arena.name, trials)


def test_the_sender_is_killed_at_every_step(arena: Arena, undisturbed: Callable[[int], list[list[float]]]) -> None:
    """In the middle of what it sends: nothing is missing in MLflow or there twice, and each trial has one model.

    Of each trial the sender is killed three times: early, again where the next one goes on, and at its end.
    """
    n_trials = len(SENDING) // 3
    orders = [
        Order(point, "kill", trial=number % n_trials, attempt=0, when=when)
        for number, (point, when) in enumerate(SENDING)
    ]
    arena.cheap = False
    arena.create(n_trials, orders, retries=len(orders))
    arena.work(2)
    missed = [order for index, order in enumerate(orders) if not arena.obeyed(index)]
    assert not missed, f"nobody was killed at {missed}"
    trials = assert_whole(arena.storage_url, arena.name, arena.home, undisturbed(n_trials), n_trials)
    assert {t.state for t in trials} == {"COMPLETE"}
    assert_tracked(arena.tracking_uri, arena.name, trials, models=True)


def assert_resumed(arena: Arena, trials: list[Trial]) -> None:
    """A committed epoch is never trained again."""
    committed = {(e["trial"], e["epoch"]): e["at"] for e in reversed(arena.events("reported"))}
    again = [
        (e["trial"], e["attempt"], e["epoch"])
        for e in arena.events("training")
        if committed.get((e["trial"], e["epoch"]), e["at"]) < e["at"]
    ]
    assert again == []
