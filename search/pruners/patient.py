"""Patience before another pruner is asked, as Optuna's PatientPruner."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from hpsearch.search.kinds import Number
from hpsearch.search.pruners.base import PrunerSpec
from hpsearch.search.pruners.decision import Case, Decision, Peers
from hpsearch.search.pruners.halving import Halving

if TYPE_CHECKING:
    from optuna.pruners import BasePruner


def _parse(given: object) -> object:
    return None if given is None else PrunerSpec.parse({"name": given} if isinstance(given, str) else given)


class Patient(PrunerSpec):
    """Ask the `wrapped` pruner, Optuna's ``PatientPruner``, once `patience` + 1 epochs are worse than the best before.

    They are by more than `min_delta`. Without a `wrapped` one such a trial is pruned.
    """

    name: Literal["patient"] = "patient"
    knows_several: ClassVar[bool] = False
    patience: int = Field(default=3, ge=0)
    min_delta: Number = Field(default=0.0, ge=0)
    wrapped: Annotated[SerializeAsAny[PrunerSpec] | None, BeforeValidator(_parse)] = None

    @model_validator(mode="after")
    def _stops(self) -> Self:
        if self.wrapped is not None and self.wrapped.promotion(1_000_000) is not None:
            raise ValueError(f"{self.wrapped.name} pauses trials, and patience is for those that end: wrap another one")
        return self

    def for_epochs(self, epochs: int) -> Self:
        wrapped = None if self.wrapped is None else self.wrapped.for_epochs(epochs)
        return self.model_copy(update={"wrapped": wrapped})

    def build(self) -> BasePruner:
        from optuna.exceptions import ExperimentalWarning
        from optuna.pruners import PatientPruner

        wrapped = None if self.wrapped is None else self.wrapped.build()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            return PatientPruner(wrapped, self.patience, self.min_delta)

    def halving(self, study: str, number: int) -> Halving | None:
        return None if self.wrapped is None else self.wrapped.halving(study, number)

    def judge(self, case: Case, peers: Peers) -> Decision:
        steps = sorted(case.values)
        before, after = steps[: -self.patience - 1], steps[-self.patience - 1 :]
        if not before:
            return case.on()
        was, since = (_best((case.values[step] for step in part), case) for part in (before, after))
        cutoff = was - self.min_delta if case.maximize else was + self.min_delta
        if not case.worse(since, cutoff):
            return case.on(value=since, cutoff=cutoff)
        why = f"{case.compared(since, cutoff, best=True)} since epoch {after[0] + 1}, after {was:.6g} before"
        if self.wrapped is None:
            return case.prune(why, value=since, cutoff=cutoff)
        decision = self.wrapped.judge(replace(case, pruner=self.wrapped.name), peers)
        return replace(decision, reason=f"{decision.reason}; {why}") if decision.prune else decision


def _best(values: Iterable[float], case: Case) -> float:
    """Return the best value that is a number; NaN where none is."""
    numbers = [value for value in values if not math.isnan(value)]
    if not numbers:
        return math.nan
    return max(numbers) if case.maximize else min(numbers)
