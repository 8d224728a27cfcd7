"""Asynchronous successive halving (Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning"), as Optuna.

A trial that reaches rung k, at epoch ``min_resource * reduction_factor ** (min_early_stopping_rate + k)``, counted
from 0, notes its value there and goes on if it is among the best ``1 / reduction_factor`` of all that have reached it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from search.pruning.decision import Case, Decision, Grounds


class Rungs(Protocol):
    """The values at the rungs of a study; those of one bracket, where there are brackets."""

    def reached(self) -> int:
        """Return how many rungs the trial has noted a value at."""
        ...

    def note(self, rung: int, value: float) -> None:
        """Note the trial's value at a rung."""
        ...

    def others(self, rung: int) -> list[float]:
        """Return the values of all other trials, in whatever state, at a rung."""
        ...


@dataclass(frozen=True)
class Halving:
    """Successive halving with its options, in one bracket of Hyperband or without any."""

    min_resource: int
    reduction_factor: int
    min_early_stopping_rate: int
    bootstrap_count: int
    bracket: int | None = None

    def epoch_of(self, rung: int) -> int:
        """Return the epoch, from 0, at which a rung is reached."""
        epochs: int = self.min_resource * self.reduction_factor ** (self.min_early_stopping_rate + rung)
        return epochs

    def judge(self, case: Case, rungs: Rungs) -> Decision:
        """Take the trial through the rungs that its last epoch reaches.

        A trial judged again at the same epoch, because its worker died in between, goes through the same rungs again.
        (Optuna's pruner would let it pass.)
        """
        rung = min(rungs.reached(), self._due(max((s for s in case.values if s != case.step), default=-1)))
        decision = case.on(bracket=self.bracket)
        while case.step >= self.epoch_of(rung):
            decision = self._at(rung, case, rungs)
            if decision.prune:
                break
            rung += 1
        return decision

    def _due(self, step: int) -> int:
        """Return how many rungs a trial has reached after epoch `step`."""
        rung = 0
        while step >= self.epoch_of(rung):
            rung += 1
        return rung

    def _at(self, rung: int, case: Case, rungs: Rungs) -> Decision:
        value = case.last
        if math.isnan(value):
            return case.prune(f"{case.metric} is not a number", value=value, rung=rung, bracket=self.bracket)
        # Noted before the others are read: of two trials that arrive at once, at least one sees the other.
        rungs.note(rung, value)
        others = rungs.others(rung)
        values = sorted([*others, value], reverse=case.maximize)
        # The first of a rung go on, unless better ones are there: none is held back to wait for others.
        promoted = max(1, len(values) // self.reduction_factor)
        cutoff = values[promoted - 1]
        grounds: Grounds = {"value": value, "peers": len(others), "rung": rung, "bracket": self.bracket}
        there = f"rung {rung}" if self.bracket is None else f"rung {rung} of bracket {self.bracket}"
        if len(values) <= self.bootstrap_count:
            why = f"is number {len(values)} at {there}, which promotes none of the first {self.bootstrap_count}"
            return case.prune(why, **grounds)
        grounds["cutoff"] = cutoff
        if case.worse(value, cutoff):
            reach = f"best {promoted} of {len(values)} trials at {there} reach"
            return case.prune(f"{case.compared(value, cutoff)}, which the {reach}", **grounds)
        return case.on(**grounds)
