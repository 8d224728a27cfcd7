"""A simulated multi-objective search: vectors of metrics, and the hypervolume of the front after each epoch.

The model of a trial's best epoch so far exists in any state of the trial. So for each method each trial counts, with
its vector at the epoch with the best reported value of the first metric. A user keeps the trials in the front of the
*reported* vectors; their quality is the hypervolume of their *true* vectors.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.search_quality.simulation import Simulation, Work
from hpsearch.storage.rungs.fronts import compute_hypervolume, find_front


@dataclass
class Worth:
    """The quality of the front over time.

    Attributes:
        spent: epochs spent at each change.
        volume: hypervolume of the front after each change.
    """

    spent: list[int] = field(default_factory=list)
    volume: list[float] = field(default_factory=list)

    def max_volume(self, epochs: int) -> float:
        """Return the largest hypervolume until this number of epochs was spent."""
        return max(self.volume[: bisect.bisect_right(self.spent, epochs)], default=0.0)

    def reached(self, target: float) -> int | None:
        """Return the epochs spent until the hypervolume first reached `target`; None if it never did."""
        pairs = zip(self.spent, self.volume, strict=True)
        return next((spent for spent, volume in pairs if volume >= target), None)


@dataclass
class SeveralMetrics(Simulation):
    """One multi-objective search; values of its `way` and its `training` are vectors.

    Args:
        higher: whether higher is better, for each metric.
        reference: reference point of the hypervolume, as losses.
        enough: hypervolume at which the search ends.
    """

    higher: Sequence[bool] = ()
    reference: Sequence[float] = ()
    enough: float = np.inf
    worth: Worth = field(default_factory=Worth)

    def __post_init__(self) -> None:
        self._shown: dict[int, np.ndarray] = {}
        self._true: dict[int, np.ndarray] = {}
        self._signs = np.where(np.asarray(self.higher), -1.0, 1.0)

    def _epoch(self, work: Work) -> bool:
        trial = self._trials[work.trial]
        value, true = trial.shown[trial.epochs], trial.true[trial.epochs]
        trial.epochs += 1
        self.history.epochs += 1
        self._note(work.trial, value * self._signs, true * self._signs)
        continues = self._timed(lambda: self.way.report(work.trial, trial.epochs - 1, value.tolist()))
        return continues and trial.epochs < min(work.until, len(trial.shown))

    def _note(self, number: int, shown: np.ndarray, true: np.ndarray) -> None:
        if number in self._shown and shown[0] >= self._shown[number][0]:
            return
        self._shown[number], self._true[number] = shown, true
        kept = find_front(np.array(list(self._shown.values())))
        volume = compute_hypervolume(np.array(list(self._true.values()))[kept], self.reference)
        if not self.worth.volume or volume != self.worth.volume[-1]:
            self.worth.spent.append(self.history.epochs)
            self.worth.volume.append(volume)
        if volume >= self.enough:
            self.budget = self.history.epochs
