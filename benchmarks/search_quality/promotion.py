"""A reference for methods that promote paused trials: algorithm 2 of Li et al. (2020) with random search.

It tests that the simulation supports such methods; `stored.py` simulates the `asha` pruner of hpsearch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.search_quality.simulation import Work


@dataclass
class Promotion:
    """Promotion ASHA (Li et al. 2020, algorithm 2) with any source of new configurations.

    Attributes:
        suggest: returns the parameters of a new trial by its number.
        maximize: whether higher is better.
        epochs: number of epochs of a full trial.
        factor: ratio of the epochs of consecutive rungs; 1 trial in `factor` is promoted.
        rungs: values of trials by rung, from 0.
        promoted: trials promoted from each rung.
    """

    suggest: Callable[[int], Mapping[str, Any]]
    maximize: bool
    epochs: int
    factor: int = 3
    rungs: dict[int, dict[int, float]] = field(default_factory=dict)
    promoted: dict[int, set[int]] = field(default_factory=dict)
    begun: int = 0

    def next_work(self) -> Work:
        """Promote a trial from the highest rung that has a promotable one; otherwise begin a trial."""
        for rung in sorted(self.rungs, reverse=True):
            if self._until(rung) < self.epochs and (trial := self._promotable(rung)) is not None:
                self.promoted.setdefault(rung, set()).add(trial)
                return Work(trial, self._until(rung + 1))
        self.begun += 1
        return Work(self.begun - 1, self._until(0), self.suggest(self.begun - 1))

    def report(self, trial: int, epoch: int, value: float) -> bool:
        """Record the value if the epoch ends at a rung."""
        rung = 0
        while self._until(rung) < epoch + 1:
            rung += 1
        if self._until(rung) == epoch + 1:
            self.rungs.setdefault(rung, {})[trial] = value
        return True

    def _until(self, rung: int) -> int:
        return int(min(self.factor**rung, self.epochs))

    def _promotable(self, rung: int) -> int | None:
        values = self.rungs[rung]
        ranked = sorted(values, key=lambda trial: (-values[trial] if self.maximize else values[trial], trial))
        best = ranked[: len(ranked) // self.factor]
        return next((trial for trial in best if trial not in self.promoted.get(rung, set())), None)
