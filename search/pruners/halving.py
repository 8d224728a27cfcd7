"""Asynchronous successive halving (Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning"), as Optuna.

A trial that reaches rung k, at epoch ``min_resource * reduction_factor ** (min_early_stopping_rate + k)``, counted
from 0, notes its value there and goes on if it is among the best ``1 / reduction_factor`` of all that have reached it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from hpsearch.search.pruners.decision import Case, Decision, Grounds, Peers
from hpsearch.storage.pareto import losses_of
from hpsearch.storage.rungs.front_order import order


@dataclass(frozen=True)
class Halving:
    """Successive halving with its options, in one bracket of Hyperband or without any.

    `is_peer` says of a trial's number whether it is in the same bracket.
    """

    min_resource: int
    reduction_factor: int
    min_early_stopping_rate: int
    bootstrap_count: int
    bracket: int | None = None
    is_peer: Callable[[int], bool] = lambda _: True

    def epoch_of(self, rung: int) -> int:
        """Return the epoch, from 0, at which a rung is reached."""
        epochs: int = self.min_resource * self.reduction_factor ** (self.min_early_stopping_rate + rung)
        return epochs

    def judge(self, case: Case, peers: Peers) -> Decision:
        """Take the trial through the rungs that its last epoch reaches.

        A trial judged again at the same epoch, because its worker died in between, goes through the same rungs again.
        (Optuna's pruner would let it pass.)
        """
        rung = min(peers.reached(), self._due(max((s for s in case.values if s != case.step), default=-1)))
        decision = case.on(bracket=self.bracket)
        while case.step >= self.epoch_of(rung):
            decision = self._at(rung, case, peers)
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

    def _at(self, rung: int, case: Case, peers: Peers) -> Decision:
        if case.several:
            return self._among_fronts(rung, case, peers)
        value = case.last
        if math.isnan(value):
            return case.prune(f"{case.metric} is not a number", value=value, rung=rung, bracket=self.bracket)
        # Noted before the others are read: of two trials that arrive at once, at least one sees the other.
        peers.note(rung, value)
        others = [at for number, at in peers.at_rung(rung) if self.is_peer(number) and not isinstance(at, list)]
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

    def _among_fronts(self, rung: int, case: Case, peers: Peers) -> Decision:
        """As with one metric, in the order of fronts: multi-objective ASHA (Schmucker et al. 2021), by stopping."""
        peers.note(rung, list(case.vector))
        others = [at for number, at in peers.at_rung(rung) if self.is_peer(number) and isinstance(at, list)]
        reached, grounds = len(others) + 1, Grounds(value=case.last, peers=len(others), rung=rung, bracket=self.bracket)
        if reached <= self.bootstrap_count:
            why = f"is number {reached} at rung {rung}, which promotes none of the first {self.bootstrap_count}"
            return case.prune(why, **grounds)
        promoted = max(1, reached // self.reduction_factor)
        # Last, so that of equal ones the earlier goes on.
        rank = order(losses_of([*others, case.vector], case.maximized)).index(len(others)) + 1
        if rank > promoted:
            return case.prune(
                f"rank {rank} of {reached} by fronts at rung {rung}, where the best {promoted} go on", **grounds
            )
        return case.on(**grounds)


def require_reachable(min_resource: int, epochs: int) -> None:
    """Refuse a first rung that no trial would ever reach."""
    if min_resource > epochs:
        raise ValueError(
            f"pruner.min_resource {min_resource} is more than epochs {epochs}: no trial would ever reach it; lower it"
        )
