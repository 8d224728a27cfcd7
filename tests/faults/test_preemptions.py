"""Preemptions at random times, many of them while the workers start."""

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
from tests.waiting import PATIENCE

pytestmark = [pytest.mark.soak, pytest.mark.faults, pytest.mark.xdist_group("trainings")]

GRACE = 5.0


@dataclass
class Preemptions:
    """Preempt each worker a random time after its start.

    Half of the workers are killed at once. The others get SIGTERM, and are killed after a grace period.
    """

    seed: int
    mean_seconds: float
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
            number = self.dice.choice([signal.SIGKILL, signal.SIGTERM])
            worker.send(number)
            self.done[number.name] += 1
            self.due[worker.pid] = -now if number == signal.SIGTERM else math.inf


@pytest.mark.parametrize(
    ("n_trials", "share", "number"),
    [(12, 0.5, 1), pytest.param(440, 0.2, 1000, marks=[pytest.mark.long, pytest.mark.timeout(7200)])],
)
def test_preemptions_fail_no_trial_and_change_no_value(
    arena: Arena, undisturbed: Callable[[int], list[list[float]]], n_trials: int, share: float, number: int
) -> None:
    """A worker is preempted after a share, on average, of the time that it needs to start and to train a trial."""
    quiet = arena.make_quiet_arena()
    quiet.create(1, [])
    began = time.monotonic()
    quiet.work(1, PACE="0.1")
    arena.create(n_trials, [])
    preemptions = Preemptions(seed=1, mean_seconds=share * (time.monotonic() - began))
    codes = (-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM)
    arena.work(4, meanwhile=preemptions, codes=codes, patience=PATIENCE + 10 * n_trials, PACE="0.1")
    quiet.close()
    values = undisturbed(n_trials)
    trials = assert_equals_undisturbed(arena.storage_url, arena.name, arena.home, values, n_trials)
    print(dict(preemptions.done), Counter(outcome for trial in trials for outcome in trial.outcomes))
    assert {trial.state for trial in trials} == {"COMPLETE"}
    assert preemptions.done.total() >= number
