"""Many preemptions at random times, most of them while the workers start."""

from __future__ import annotations

import math
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tests.faults.harness import Arena, Worker
from tests.faults.invariants import assert_equals_undisturbed

pytestmark = [pytest.mark.soak, pytest.mark.faults, pytest.mark.xdist_group("trainings")]

GRACE = 5.0


@dataclass
class Preemptions:
    """Preempt each worker a random time after its start, until `most` workers were preempted.

    Half of the workers are killed at once. The others get SIGTERM, and are killed after a grace period.
    """

    seed: int
    mean_seconds: float
    most: int
    done: Counter[str] = field(default_factory=Counter)
    due: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)

    def __call__(self, running: list[Worker]) -> None:
        now = time.monotonic()
        for worker in running:
            due = self.due.setdefault(worker.pid, now + self.dice.expovariate(1 / self.mean_seconds))
            if worker.ended or now < due:
                continue
            if due < 0:  # the grace period began
                if now > GRACE - due:
                    worker.send(signal.SIGKILL)
                continue
            if self.done.total() == self.most:
                continue
            number = self.dice.choice([signal.SIGKILL, signal.SIGTERM])
            worker.send(number)
            self.done[number.name] += 1
            self.due[worker.pid] = -now if number == signal.SIGTERM else math.inf


@pytest.mark.parametrize("most", [1000])
def test_preemptions_fail_no_trial_and_change_no_value(
    arena: Arena, undisturbed: Callable[[int], list[list[float]]], most: int
) -> None:
    arena.create(12, [])
    preemptions = Preemptions(seed=1, mean_seconds=0.5, most=most)
    arena.work(4, meanwhile=preemptions, codes=(-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM), PACE="0.1")
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, undisturbed(12), 12)
    print(dict(preemptions.done), len(arena.workers), Counter(o for trial in trials for o in trial.outcomes))
    assert {trial.state for trial in trials} == {"COMPLETE"}
