"""Kill a worker in each attempt of each trial: when it reaches a rung, and after its promotion."""

from __future__ import annotations

from collections.abc import Sequence

from tests.faults.harness import Arena
from tests.faults.invariants import Trial
from tests.faults.orders import Order

# The points where a worker is killed in the attempt that reaches the first rung, and in the one after the promotion.
COMING = [
    ("report", "before", 0),
    ("report", "after", 0),
    ("reach rung", "before", 0),
    ("upload checkpoint", "after", 0),
]
PROMOTED = [
    ("claim", "after"),
    ("restore checkpoint", "before"),
    ("restore checkpoint", "after"),
    ("log params", "before"),
]


def kills(quiet: Arena, expected: Sequence[Trial]) -> tuple[list[Order], list[list[str]]]:
    """Return orders for a study that ends as `expected` without faults, and the attempts' outcomes with these orders.

    Its rungs are after the first epoch, the second and so on. So a trial waited after its first attempt's last epoch.
    """
    reported = [event for event in quiet.events("reported") if event["attempt"] == 1]
    first = {event["trial"]: event["epoch"] for event in reported}
    orders, outcomes = [], []
    for trial in expected:
        point, when, epoch = COMING[trial.number % len(COMING)]
        orders.append(Order(point, "kill", trial=trial.number, when=when, epoch=epoch))
        story = ["lost", *trial.outcomes]
        if trial.outcomes[0] == "paused":  # a completed step costs no attempt
            orders.append(
                Order("reach rung", "kill", trial=trial.number, attempt=2, when="after", nth=1 + first[trial.number])
            )
        if len(trial.outcomes) > 1:
            point, when = PROMOTED[trial.number % len(PROMOTED)]
            orders.append(Order(point, "kill", trial=trial.number, attempt=3, when=when))
            story.insert(2, "lost")
        elif trial.state == "PRUNED":
            orders.append(Order("log retired trial", "kill", trial=trial.number, attempt=2))
        outcomes.append(story)
    return orders, outcomes
