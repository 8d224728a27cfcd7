"""A discrete-event simulation of a search with many workers that request work, train epochs and report values.

A search method decides what to train next and whether a trial continues. Workers are asynchronous, since trials have
different speeds. The budget counts epochs of all trials.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from hpsearch.search.samplers.suggest import derive_seed

Curve = np.ndarray | Sequence[float]
PACES = 0.3  # standard deviation of the logarithm of a trial's time per epoch


@dataclass(frozen=True)
class Work:
    """The next task of a worker.

    Attributes:
        trial: number of the trial, from 0.
        until: total number of epochs of the trial after which the worker releases it.
        params: parameters of a new trial; None resumes a trial that was released before.
    """

    trial: int
    until: int
    params: Mapping[str, Any] | None = None


class Way(Protocol):
    """A search method."""

    def next_work(self) -> Work | None:
        """Return a new trial or one to resume; None if the worker must wait until another has reported."""
        ...

    def report(self, trial: int, epoch: int, value: float) -> bool:
        """Report a trial's value after an epoch, counted from 0, and return whether the trial continues.

        The result is ignored after the last epoch of a full trial, and at the end of the work.
        """
        ...


class Training(Protocol):
    """A replacement for the training of configurations."""

    def trial(self, params: Mapping[str, Any], random: np.random.Generator) -> tuple[Curve, Curve]:
        """Return the learning curve [epochs] of one training, and the true one without noise.

        Each value is read after all values before it, so it may be computed when it is first read.
        """
        ...


@dataclass
class Trial:
    """A trial, from its begin."""

    shown: Curve
    true: Curve
    pace: float
    epochs: int = 0


@dataclass
class History:
    """The result of a search.

    Attributes:
        spent: epochs spent at each change of the best reported value.
        best: true value of the trial with the best reported value, at each change.
        epochs: total number of epochs.
        trials: number of trials begun.
        full: number of trials that reached the last epoch.
        final: true value of the full trial with the best reported value; None without a full trial, or with several
            metrics.
        seconds: CPU time of the decisions.
    """

    spent: list[int] = field(default_factory=list)
    best: list[float] = field(default_factory=list)
    epochs: int = 0
    trials: int = 0
    full: int = 0
    final: float | None = None
    seconds: float = 0.0

    def reached(self, target: float, *, maximize: bool) -> int | None:
        """Return the epochs spent until the best was first as good as `target`; None if it never was."""
        good = (best >= target if maximize else best <= target for best in self.best)
        return next((spent for spent, enough in zip(self.spent, good, strict=True) if enough), None)

    def at(self, epochs: int) -> float:
        """Return the best value after a number of epochs; NaN before the first epoch."""
        place = int(np.searchsorted(self.spent, epochs, side="right"))
        return self.best[place - 1] if place else math.nan


@dataclass
class Simulation:
    """One search.

    Args:
        way: the search method.
        training: the replacement for training.
        maximize: whether higher is better.
        workers: number of concurrent workers.
        budget: total number of epochs.
        seed: seed of the noise and the speed of trials, which depend only on it and the number of the trial.
        trials: maximum number of trials, with whose end the search ends; None means unlimited.
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
        """Simulate the search until a budget is spent."""
        self._trials: dict[int, Trial] = {}
        self._incumbent = -math.inf
        # Sorted by time, then by worker, so that the order is deterministic.
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
                raise RuntimeError("deadlock: all workers wait for work")
            now, worker = heapq.heappop(events)
            if self._epoch(jobs[worker]):
                heapq.heappush(events, (now + self._trials[jobs[worker].trial].pace, worker))
            else:
                idle.append(worker)
        self.history.trials = len(self._trials)
        full = [trial for trial in self._trials.values() if trial.epochs == len(trial.shown)]
        self.history.full = len(full)
        if full and np.ndim(full[0].shown[0]) == 0:
            sign = 1 if self.maximize else -1
            values = [sign * np.array(list(trial.shown)) for trial in full]
            best = int(np.argmax([value.max() for value in values]))
            self.history.final = float(full[best].true[int(values[best].argmax())])
        return self.history

    def _at_work(self, idle: list[int], jobs: dict[int, Work]) -> Iterator[int]:
        """Assign work to idle workers, and yield those that got some."""
        for worker in sorted(idle):
            work = self._timed(self.way.next_work)
            if work is None:
                return
            if work.params is not None:
                self._begin(work.trial, work.params)
            elif work.until <= self._trials[work.trial].epochs:
                raise RuntimeError(f"trial {work.trial} has already trained epoch {work.until}")
            idle.remove(worker)
            jobs[worker] = work
            yield worker

    def _begin(self, number: int, params: Mapping[str, Any]) -> None:
        if number in self._trials:
            raise RuntimeError(f"trial {number} was already begun")
        random = np.random.default_rng(derive_seed(self.seed, "trial", number))
        pace = float(np.exp(PACES * random.standard_normal()))
        self._trials[number] = Trial(*self.training.trial(params, random), pace)

    def _epoch(self, work: Work) -> bool:
        """Train a trial for an epoch; return whether its worker continues it."""
        trial = self._trials[work.trial]
        value, true = float(trial.shown[trial.epochs]), float(trial.true[trial.epochs])
        trial.epochs += 1
        self.history.epochs += 1
        goodness = value if self.maximize else -value
        if goodness > self._incumbent:
            self._incumbent = goodness
            self.history.spent.append(self.history.epochs)
            self.history.best.append(true)
        continues = self._timed(lambda: self.way.report(work.trial, trial.epochs - 1, value))
        return continues and trial.epochs < min(work.until, len(trial.shown))

    def _timed(self, decide: Any) -> Any:
        started = time.process_time()
        decision = decide()
        self.history.seconds += time.process_time() - started
        return decision
