"""A search for a front: as the simulation of one metric, with vectors, and what the front is worth after each epoch.

A model of a trial exists at its best epoch so far, whatever becomes of the trial: so each trial that was begun counts,
whoever searches, with its vector at the epoch that the first metric, as reported, finds best. A user keeps those of
them that are in the front of the *reported* vectors; what that is worth is the hypervolume of their *true* ones.
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
    """What the front is worth.

    Attributes:
        spent: epochs that had been spent whenever it changed.
        volume: its hypervolume since.
    """

    spent: list[int] = field(default_factory=list)
    volume: list[float] = field(default_factory=list)

    def max_volume(self, epochs: int) -> float:
        """Return the largest hypervolume until this number of epochs was spent."""
        return max(self.volume[: bisect.bisect_right(self.spent, epochs)], default=0.0)

    def reached(self, target: float) -> int | None:
        """The epochs that were spent until it was first worth so much; None if it never was."""
        pairs = zip(self.spent, self.volume, strict=True)
        return next((spent for spent, volume in pairs if volume >= target), None)


@dataclass
class SeveralMetrics(Simulation):
    """One search for a front; its `way` takes and its `training` gives vectors.

    Args:
        higher: of each metric, whether higher is better.
        reference: as losses, as bad as counts.
        enough: ends the search as soon as the front is worth so much.
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
        goes_on = self._asked(lambda: self.way.report(work.trial, trial.epochs - 1, value.tolist()))
        return goes_on and trial.epochs < min(work.until, len(trial.shown))

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
