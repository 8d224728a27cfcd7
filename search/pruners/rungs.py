"""Pruners with rungs: successive halving, Hyperband, ASHA."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Literal, Self
from zlib import crc32

from pydantic import Field

from hpsearch.search.pruners.base import (
    Decision,
    Halving,
    OtherTrials,
    Promotion,
    PrunerSpec,
    PruningContext,
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

    def for_epochs(self, epochs: int) -> Self:
        check_min_resource(self.min_resource, epochs)
        return self

    def halving(self, study: str, number: int) -> Halving:
        return Halving(**self.options)

    def judge(self, case: PruningContext, peers: OtherTrials) -> Decision:
        return self.halving(case.study, case.number).judge(case, peers)


class Hyperband(PrunerSpec):
    """Hyperband (Li et al. 2018), Optuna's ``HyperbandPruner``; `max_resource` is the spec's epochs unless given."""

    name: Literal["hyperband"] = "hyperband"
    can_be_multi_objective: ClassVar[bool] = False
    min_resource: int = Field(default=1, ge=1)
    max_resource: int | None = Field(default=None, ge=1)
    reduction_factor: int = Field(default=3, ge=2)
    bootstrap_count: int = Field(default=0, ge=0)

    def for_epochs(self, epochs: int) -> Self:
        check_min_resource(self.min_resource, epochs)
        if (self.max_resource or epochs) < self.min_resource:
            raise ValueError(
                f"pruner.max_resource {self.max_resource} is less than pruner.min_resource {self.min_resource}: "
                "give the epochs of a full trial, or leave it out"
            )
        return self if self.max_resource else self.model_copy(update={"max_resource": epochs})

    def build(self) -> BasePruner:
        from optuna.pruners import HyperbandPruner

        pruner = HyperbandPruner(**self.options)
        # It makes its brackets at its first verdict, which is ours to give: without them the sampler would not tell
        # one bracket's trials from another's.
        pruner._try_initialization(study=None)  # type: ignore[arg-type]  # it asks a study nothing
        return pruner

    def halving(self, study: str, number: int) -> Halving | None:
        assert self.max_resource is not None
        parts = compute_bracket_shares(self.min_resource, self.max_resource, self.reduction_factor)
        if not parts:
            return None
        own = choose_bracket(study, number, parts)

        def is_peer(other: int) -> bool:
            return choose_bracket(study, other, parts) == own

        return Halving(self.min_resource, self.reduction_factor, own, self.bootstrap_count, own, is_peer)

    def judge(self, case: PruningContext, peers: OtherTrials) -> Decision:
        halving = self.halving(case.study, case.number)
        return case.keep() if halving is None else halving.judge(case, peers)


@cache
def compute_bracket_shares(min_resource: int, max_resource: int, reduction_factor: int) -> tuple[int, ...]:
    """Return how many of every ``sum(shares)`` trials each bracket gets; none, where no bracket fits."""
    # In floating point, as in Optuna: log(243, 3) is a little less than 5.
    brackets = math.floor(math.log(max_resource / min_resource, reduction_factor)) + 1
    return tuple(
        math.ceil(brackets * reduction_factor ** (brackets - 1 - bracket) / (brackets - bracket))
        for bracket in range(brackets)
    )


def choose_bracket(study_name: str, number: int, shares: tuple[int, ...]) -> int:
    """Return the bracket of a trial, from 0, the one that prunes earliest."""
    ticket = crc32(f"{study_name}_{number}".encode()) % sum(shares)
    for bracket, share in enumerate(shares):
        ticket -= share
        if ticket < 0:
            return bracket
    raise AssertionError("the ticket is less than the sum of the shares")


class ASHA(PrunerSpec):
    """Pause each trial at epochs `min_resource * reduction_factor ** k`; the best of a rung go on (Li et al. 2020).

    Of those that have reached a rung one in `reduction_factor` goes on, by its best value up to there, as soon as it is
    among them: on any worker, from its checkpoint. What never is, is pruned at the end. Nothing that waits is lost by
    others having been unlucky early, as where trials are stopped for good (`successive_halving`). The best
    `min_complete` are trained to their end also where too few trials are begun for so many to come through all rungs.
    """

    name: Literal["asha"] = "asha"
    min_resource: int = Field(default=1, ge=1)
    reduction_factor: int = Field(default=3, ge=2)
    min_complete: int = Field(default=3, ge=1)

    def for_epochs(self, epochs: int) -> Self:
        if self.min_resource >= max(epochs, 2):  # one epoch alone is no mistake
            raise ValueError(
                f"pruner.min_resource {self.min_resource} is not below epochs {epochs}: no trial would ever be paused; "
                "lower it"
            )
        return self

    def judge(self, case: PruningContext, peers: OtherTrials) -> Decision:
        return case.keep()  # a trial is judged at rungs alone, where it is paused

    def promotion(self, epochs: int) -> Promotion | None:
        reached, rung = [], self.min_resource
        while rung < epochs:
            reached.append(rung)
            rung *= self.reduction_factor
        return Promotion(tuple(reached), self.reduction_factor, self.min_complete) if reached else None
