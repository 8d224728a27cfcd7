"""Successive halving without brackets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field

from hpsearch.search.pruners.base import PrunerSpec
from hpsearch.search.pruners.decision import Case, Decision, Peers
from hpsearch.search.pruners.halving import Halving, require_reachable

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
        require_reachable(self.min_resource, epochs)
        return self

    def build(self) -> BasePruner:
        from optuna.pruners import SuccessiveHalvingPruner

        return SuccessiveHalvingPruner(**self.options)

    def halving(self, study: str, number: int) -> Halving:
        return Halving(**self.options)

    def judge(self, case: Case, peers: Peers) -> Decision:
        return self.halving(case.study, case.number).judge(case, peers)
