"""A search with many workers, event by event: they ask for work, train epoch by epoch, and report as they go.

Nothing here decides: a way of searching says what to train next and whether a trial goes on. Workers are asynchronous,
since trials have paces of their own. Epochs are counted, whichever trial they are spent on.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from hpsearch.search.samplers.suggest import derive_seed

PACES = 0.3  # deviation of the logarithm of the time that trials take for an epoch


@dataclass(frozen=True)
class Work:
    """What a worker is to do next.

    Attributes:
        trial: its number, from 0.
        until: after how many epochs in all the worker gives the trial back and asks again.
        params: of a new trial; None goes on with one that was given back before, where it was left.
    """

    trial: int
    until: int
    params: Mapping[str, Any] | None = None


class Way(Protocol):
    """A way of searching."""

    def next_work(self) -> Work | None:
        """A new trial, or one to go on with; None lets the worker wait until another has reported."""
        ...

    def report(self, trial: int, epoch: int, value: float) -> bool:
        """Takes a trial's value after an epoch, from 0, and says whether it goes on.

        After the last epoch of a full trial, and where the work ends, the answer is not asked for.
        """
        ...


class Training(Protocol):
    """What stands in for the training of configurations."""

    def trial(self, params: Mapping[str, Any], random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """The curve [epochs] that one training shows, and the true one without noise."""
        ...


@dataclass
class Trial:
    """A trial that was begun."""

    shown: np.ndarray
    true: np.ndarray
    pace: float
    epochs: int = 0


@dataclass
class History:
    """What a search came to.

    Attributes:
        spent: epochs that had been spent whenever there was a new best.
        best: what the trial of the best reported value is truly worth then.
        epochs: spent in all.
        trials: that were begun.
        full: that reached the last epoch.
        seconds: that the decisions took.
    """

    spent: list[int] = field(default_factory=list)
    best: list[float] = field(default_factory=list)
    epochs: int = 0
    trials: int = 0
    full: int = 0
    seconds: float = 0.0

    def reached(self, target: float, *, maximize: bool) -> int | None:
        """The epochs that were spent until the best was first as good as `target`; None if it never was."""
        good = (best >= target if maximize else best <= target for best in self.best)
        return next((spent for spent, enough in zip(self.spent, good, strict=True) if enough), None)

    def at(self, epochs: int) -> float:
        """The best after so many epochs; NaN before the first."""
        place = int(np.searchsorted(self.spent, epochs, side="right"))
        return self.best[place - 1] if place else math.nan


@dataclass
class Simulation:
    """One search.

    Args:
        way: decides.
        training: what is trained.
        maximize: whether higher is better.
        workers: at work at once.
        budget: epochs in all.
        seed: of the noise and the paces of trials, which depend on it and on a trial's number alone.
        trials: that the way begins at most; with the last of them the search ends.
    """

    way: Way
    training: Training
    maximize: bool
    workers: int
    budget: int
    seed: int
    trials: int | None = None
    history: History = field(default_factory=History)

    def run(self) -> History:
        """Searches until a budget is spent."""
        self._trials: dict[int, Trial] = {}
        self._incumbent = -math.inf
        # By time, then by worker, so that nothing is left to chance.
        events: list[tuple[float, int]] = []
        jobs: dict[int, Work] = {}
        idle = list(range(self.workers))
        now = 0.0
        while self.history.epochs < self.budget:
            for worker in self._at_work(idle, jobs):
                heapq.heappush(events, (now + self._trials[jobs[worker].trial].pace, worker))
            if not events and len(self._trials) == self.trials:
                break
            if not events:
                raise RuntimeError("no worker has anything to do, and none ever will")
            now, worker = heapq.heappop(events)
            if self._epoch(jobs[worker]):
                heapq.heappush(events, (now + self._trials[jobs[worker].trial].pace, worker))
            else:
                idle.append(worker)
        self.history.trials = len(self._trials)
        self.history.full = sum(trial.epochs == len(trial.shown) for trial in self._trials.values())
        return self.history

    def _at_work(self, idle: list[int], jobs: dict[int, Work]) -> Iterator[int]:
        """The idle workers that are given work; the others stay idle."""
        for worker in sorted(idle):
            work = self._asked(self.way.next_work)
            if work is None:
                return
            if work.params is not None:
                self._begin(work.trial, work.params)
            elif work.until <= self._trials[work.trial].epochs:
                raise RuntimeError(f"trial {work.trial} is past epoch {work.until} already")
            idle.remove(worker)
            jobs[worker] = work
            yield worker

    def _begin(self, number: int, params: Mapping[str, Any]) -> None:
        if number in self._trials:
            raise RuntimeError(f"trial {number} was begun before")
        random = np.random.default_rng(derive_seed(self.seed, "trial", number))
        pace = float(np.exp(PACES * random.standard_normal()))
        self._trials[number] = Trial(*self.training.trial(params, random), pace)

    def _epoch(self, work: Work) -> bool:
        """Trains a trial for an epoch; whether its worker goes on with it."""
        trial = self._trials[work.trial]
        value, true = float(trial.shown[trial.epochs]), float(trial.true[trial.epochs])
        trial.epochs += 1
        self.history.epochs += 1
        goodness = value if self.maximize else -value
        if goodness > self._incumbent:
            self._incumbent = goodness
            self.history.spent.append(self.history.epochs)
            self.history.best.append(true)
        goes_on = self._asked(lambda: self.way.report(work.trial, trial.epochs - 1, value))
        return goes_on and trial.epochs < min(work.until, len(trial.shown))

    def _asked(self, question: Any) -> Any:
        started = time.process_time()
        answer = question()
        self.history.seconds += time.process_time() - started
        return answer
