"""Asynchronous successive halving by promotion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field

from hpsearch.search.pruners.base import Promotion, PrunerSpec
from hpsearch.search.pruners.decision import Case, Decision, Peers

if TYPE_CHECKING:
    from optuna.pruners import BasePruner


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

    def build(self) -> BasePruner:
        from optuna.pruners import NopPruner

        return NopPruner()

    def judge(self, case: Case, peers: Peers) -> Decision:
        return case.on()  # a trial is judged at rungs alone, where it is paused

    def promotion(self, epochs: int) -> Promotion | None:
        reached, rung = [], self.min_resource
        while rung < epochs:
            reached.append(rung)
            rung *= self.reduction_factor
        return Promotion(tuple(reached), self.reduction_factor, self.min_complete) if reached else None
