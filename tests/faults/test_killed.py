"""Workers that are killed between any two steps: each trial is resumed, and nothing is lost or duplicated."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.harness import Arena
from tests.faults.invariants import Trial, assert_equals_undisturbed, assert_tracked
from tests.faults.orders import Order

Point = tuple[str, str, int | None]  # point, before or after, epoch

# The points where the worker of each trial, and each next worker of the same trial, is killed.
LOST: list[list[Point]] = [
    [("claim", "after", None), ("suggest", "before", None), ("log params", "before", None)],
    [("training", "before", 0), ("write checkpoint file", "after", 1), ("remove superseded checkpoints", "after", 2)],
    [("report", "before", 0), ("upload checkpoint", "before", 1), ("training", "before", 2)],
    [("upload checkpoint", "after", 1), ("report", "after", 1), ("report", "after", 3)],
    [("publish run", "before", None), ("log model", "after", None), ("record outcome", "before", None)],
    [
        ("training", "before", 2),
        ("fetch checkpoint", "after", None),
        ("restore checkpoint", "after", None),
        ("train epoch", "before", None),
    ],
]
# Kills that cost no attempt: before the claim commits, and after the trial is completed.
FREE: list[Point] = [
    ("write claim", "after", None),
    ("record outcome", "after", None),
    ("finish run", "after", None),
    ("remove checkpoints", "after", None),
]

# The points where the sender's process is killed. The trial that the process trains meanwhile is lost too.
SENDING = [
    ("send records", "after"),
    ("create run", "before"),
    ("create run", "after"),
    ("record run", "after"),  # not committed yet
    ("log batch", "before"),
    ("log batch", "after"),
    ("record position", "before"),
    ("upload files", "before"),
    ("upload files", "after"),
    ("end run", "before"),
    ("end run", "after"),
    ("record delivery", "after"),
]
# The same for trials with a model, which is the slowest part of a trial.
SENDING_MODELS = [
    ("create model", "before"),
    ("create model", "after"),
    ("upload model", "before"),
    ("upload model", "after"),
    ("record delivery", "before"),
    ("drop checkpoint pointers", "before"),
]

pytestmark = [pytest.mark.faults, pytest.mark.xdist_group("faults")]


def test_a_kill_at_every_step_changes_no_result(arena: Arena, undisturbed: Callable[[int], list[list[float]]]) -> None:
    killed = [*LOST, *([point] for point in FREE)]
    orders = [
        Order(point, "kill", trial=number, attempt=attempt, when=when, epoch=epoch)
        for number, points in enumerate(killed)
        for attempt, (point, when, epoch) in enumerate(points, start=1)
    ]
    n_trials = len(killed)
    arena.create(n_trials, orders, retries=max(map(len, killed)))
    arena.work(2)
    missed = [order for index, order in enumerate(orders) if not arena.has_obeyed(index)]
    assert not missed, f"no worker was killed at {missed}"
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(n_trials), n_trials)
    assert {t.state for t in trials} == {"COMPLETE"}
    lost = [*map(len, LOST), *[0] * len(FREE)]
    assert [t.outcomes for t in trials] == [["lost"] * times + ["complete"] for times in lost]
    assert_resumed(arena, trials)
    assert_tracked(arena.tracking_uri, arena.name, trials)


@pytest.mark.soak
def test_a_kill_of_the_sender_at_every_step_loses_and_duplicates_nothing(
    arena: Arena, undisturbed: Callable[[int], list[list[float]]]
) -> None:
    """It is killed while it sends: nothing is missing or duplicated in MLflow, and a trial has one model.

    For each trial the sender is killed three times: early, again where the next sender continues, and at the end.
    """
    with_models = range(len(SENDING_MODELS) // 3)
    others = range(len(with_models), len(with_models) + len(SENDING) // 3)
    n_trials = others.stop
    orders = [
        Order(point, "kill", trial=trials[number % len(trials)], attempt=0, when=when)
        for trials, points in ((with_models, SENDING_MODELS), (others, SENDING))
        for number, (point, when) in enumerate(points)
    ]
    arena.models = list(with_models)
    arena.create(n_trials, orders, retries=len(orders))
    arena.work(2)
    missed = [order for index, order in enumerate(orders) if not arena.has_obeyed(index)]
    assert not missed, f"no worker was killed at {missed}"
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(n_trials), n_trials)
    assert {t.state for t in trials} == {"COMPLETE"}
    assert_tracked(arena.tracking_uri, arena.name, trials, models=with_models)


def assert_resumed(arena: Arena, trials: list[Trial]) -> None:
    """Assert that no committed epoch is trained again."""
    committed = {(e["trial"], e["epoch"]): e["at"] for e in reversed(arena.events("reported"))}
    again = [
        (e["trial"], e["attempt"], e["epoch"])
        for e in arena.events("training")
        if committed.get((e["trial"], e["epoch"]), e["at"]) < e["at"]
    ]
    assert again == []
