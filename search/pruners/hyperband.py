"""Hyperband's brackets (Li et al. 2018, algorithm 1), dealt out as Optuna does: a function of study name and number."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Literal, Self
from zlib import crc32

from pydantic import Field

from hpsearch.search.pruners.base import PrunerSpec
from hpsearch.search.pruners.decision import Case, Decision, Peers
from hpsearch.search.pruners.halving import Halving, require_reachable

if TYPE_CHECKING:
    from optuna.pruners import BasePruner


class Hyperband(PrunerSpec):
    """Hyperband (Li et al. 2018), Optuna's ``HyperbandPruner``; `max_resource` is the spec's epochs unless given."""

    name: Literal["hyperband"] = "hyperband"
    knows_several: ClassVar[bool] = False
    min_resource: int = Field(default=1, ge=1)
    max_resource: int | None = Field(default=None, ge=1)
    reduction_factor: int = Field(default=3, ge=2)
    bootstrap_count: int = Field(default=0, ge=0)

    def for_epochs(self, epochs: int) -> Self:
        require_reachable(self.min_resource, epochs)
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
        parts = shares(self.min_resource, self.max_resource, self.reduction_factor)
        if not parts:
            return None
        own = bracket_of(study, number, parts)

        def is_peer(other: int) -> bool:
            return bracket_of(study, other, parts) == own

        return Halving(self.min_resource, self.reduction_factor, own, self.bootstrap_count, own, is_peer)

    def judge(self, case: Case, peers: Peers) -> Decision:
        halving = self.halving(case.study, case.number)
        return case.on() if halving is None else halving.judge(case, peers)


@cache
def shares(min_resource: int, max_resource: int, reduction_factor: int) -> tuple[int, ...]:
    """Return how many of every ``sum(shares)`` trials each bracket gets; none, where no bracket fits."""
    # In floating point, as in Optuna: log(243, 3) is a little less than 5.
    brackets = math.floor(math.log(max_resource / min_resource, reduction_factor)) + 1
    return tuple(
        math.ceil(brackets * reduction_factor ** (brackets - 1 - bracket) / (brackets - bracket))
        for bracket in range(brackets)
    )


def bracket_of(study_name: str, number: int, shares: tuple[int, ...]) -> int:
    """Return the bracket of a trial, from 0, the one that prunes earliest."""
    ticket = crc32(f"{study_name}_{number}".encode()) % sum(shares)
    for bracket, share in enumerate(shares):
        ticket -= share
        if ticket < 0:
            return bracket
    raise AssertionError("the ticket is less than the sum of the shares")
