"""Pruners with rungs: successive halving, Hyperband, ASHA."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Literal, Self
from zlib import crc32

from pydantic import Field

from hpsearch.search.pruners.base_and_halving import (
    Decision,
    Halving,
    OtherTrials,
    PrunerSpec,
    PruningContext,
    RungSchedule,
    check_min_resource,
)

if TYPE_CHECKING:
    from optuna.pruners import BasePruner


class SuccessiveHalving(PrunerSpec):
    """Asynchronous successive halving (Li et al. 2020), Optuna's ``SuccessiveHalvingPruner``."""

    name: Literal["successive_halving"] = "successive_halving"
    min_resource: int = Field(default=1, ge=1)
    reduction_factor: int = Field(default=4, ge=2)
    min_early_stopping_rate: int = Field(default=0, ge=0)
    bootstrap_count: int = Field(default=0, ge=0)

    def fit_to_epochs(self, epochs: int) -> Self:
        check_min_resource(self.min_resource, epochs)
        return self

    def get_halving(self, study: str, number: int) -> Halving:
        return Halving(**self.options)

    def decide(self, case: PruningContext, peers: OtherTrials) -> Decision:
        return self.get_halving(case.study, case.number).decide(case, peers)


class Hyperband(PrunerSpec):
    """Hyperband (Li et al. 2018), Optuna's ``HyperbandPruner``; `max_resource` is by default the epochs of a trial."""

    name: Literal["hyperband"] = "hyperband"
    can_be_multi_objective: ClassVar[bool] = False
    min_resource: int = Field(default=1, ge=1)
    max_resource: int | None = Field(default=None, ge=1)
    reduction_factor: int = Field(default=3, ge=2)
    bootstrap_count: int = Field(default=0, ge=0)

    def fit_to_epochs(self, epochs: int) -> Self:
        check_min_resource(self.min_resource, epochs)
        if (self.max_resource or epochs) < self.min_resource:
            raise ValueError(
                f"pruner.max_resource {self.max_resource} is less than pruner.min_resource {self.min_resource}; "
                "set pruner.max_resource to the epochs of a full trial, or remove this option"
            )
        return self if self.max_resource else self.model_copy(update={"max_resource": epochs})

    def build(self) -> BasePruner:
        from optuna.pruners import HyperbandPruner

        pruner = HyperbandPruner(**self.options)
        # Optuna's pruner creates its brackets at its first decision, and here `decide` makes the decisions. Without
        # brackets, the sampler would mix the trials of all brackets.
        pruner._try_initialization(study=None)  # type: ignore[arg-type]  # the study is not used
        return pruner

    def get_halving(self, study: str, number: int) -> Halving | None:
        assert self.max_resource is not None
        shares = compute_bracket_shares(self.min_resource, self.max_resource, self.reduction_factor)
        if not shares:
            return None
        own = choose_bracket(study, number, shares)

        def is_peer(other: int) -> bool:
            return choose_bracket(study, other, shares) == own

        return Halving(self.min_resource, self.reduction_factor, own, self.bootstrap_count, own, is_peer)

    def decide(self, case: PruningContext, peers: OtherTrials) -> Decision:
        halving = self.get_halving(case.study, case.number)
        return case.keep() if halving is None else halving.decide(case, peers)


@cache
def compute_bracket_shares(min_resource: int, max_resource: int, reduction_factor: int) -> tuple[int, ...]:
    """Return the number of trials in each bracket among ``sum(shares)`` trials; empty if no bracket is possible."""
    # In floating point, as in Optuna: log(243, 3) is a little less than 5.
    brackets = math.floor(math.log(max_resource / min_resource, reduction_factor)) + 1
    return tuple(
        math.ceil(brackets * reduction_factor ** (brackets - 1 - bracket) / (brackets - bracket))
        for bracket in range(brackets)
    )


def choose_bracket(study_name: str, number: int, shares: tuple[int, ...]) -> int:
    """Return the bracket of a trial, from 0; in bracket 0, trials are pruned earliest."""
    ticket = crc32(f"{study_name}_{number}".encode()) % sum(shares)
    for bracket, share in enumerate(shares):
        ticket -= share
        if ticket < 0:
            return bracket
    raise AssertionError("the ticket is less than the sum of the shares")


# The default first rung is after this fraction of the epochs, but not after more than their cube root. Earlier values
# predict little of the final ranking, and later rungs leave less of the budget (benchmarks/search_quality).
_FIRST_RUNG_DIVISOR = 9


class ASHA(PrunerSpec):
    """Pause trials at rungs, promote the best (Li et al. 2020); the default `min_resource` depends on the epochs.

    The rungs are after `min_resource * reduction_factor ** k` epochs. By default, `min_resource` is a ninth of the
    epochs, but not more than their cube root. A trial that waits at a rung is promoted when its best value is among the
    best 1 / `reduction_factor` of the trials that have reached the rung. Any worker can resume the trial from its
    checkpoint. Trials that are never promoted are pruned at the end of the search. Unlike with `successive_halving`, a
    trial that is poor at a rung can be promoted later. At least `min_complete` trials train to completion, even if the
    search starts too few trials for as many promotions at each rung. A budget in seconds or a timeout may end the
    search before.
    """

    name: Literal["asha"] = "asha"
    min_resource: int | None = Field(default=None, ge=1)
    reduction_factor: int = Field(default=3, ge=2)
    min_complete: int = Field(default=3, ge=1)

    def fit_to_epochs(self, epochs: int) -> Self:
        if self.min_resource is None:
            return self.model_copy(update={"min_resource": _get_default_first_rung(epochs)})
        if self.min_resource >= max(epochs, 2):  # a single epoch is valid
            raise ValueError(
                f"pruner.min_resource {self.min_resource} is not below --epochs {epochs}, so no trial would be paused; "
                "lower pruner.min_resource"
            )
        return self

    def decide(self, case: PruningContext, peers: OtherTrials) -> Decision:
        return case.keep()  # trials are compared at rungs only, where they are paused

    def get_rung_schedule(self, epochs: int) -> RungSchedule | None:
        reached, rung = [], self.min_resource or _get_default_first_rung(epochs)
        while rung < epochs:
            reached.append(rung)
            rung *= self.reduction_factor
        return RungSchedule(tuple(reached), self.reduction_factor, self.min_complete) if reached else None


def _get_default_first_rung(epochs: int) -> int:
    """Return the number of epochs before the first rung, for trials of `epochs` epochs."""
    return max(1, min(round(epochs / _FIRST_RUNG_DIVISOR), math.floor(math.cbrt(epochs))))
