"""No pruning."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from hpsearch.search.pruners.base import PrunerSpec
from hpsearch.search.pruners.decision import Case, Decision, Peers

if TYPE_CHECKING:
    from optuna.pruners import BasePruner


class NoPruning(PrunerSpec):
    """Every trial runs all its epochs, Optuna's ``NopPruner``."""

    name: Literal["none"] = "none"

    prunes: ClassVar[bool] = False

    def build(self) -> BasePruner:
        from optuna.pruners import NopPruner

        return NopPruner()

    def judge(self, case: Case, peers: Peers) -> Decision:
        return case.on()
