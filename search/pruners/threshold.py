"""Pruning at an absolute bound, as Optuna's ThresholdPruner."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from hpsearch.search.kinds import Number
from hpsearch.search.pruners.base import PrunerSpec
from hpsearch.search.pruners.decision import Case, Decision, Peers, first_of_interval

if TYPE_CHECKING:
    from optuna.pruners import BasePruner


class Threshold(PrunerSpec):
    """Prune at an absolute bound, Optuna's ``ThresholdPruner``; which way is better does not matter.

    It is a bound on the study's metric, or on the `metric` that is named: one that is optimised, or has constraints.
    """

    name: Literal["threshold"] = "threshold"
    lower: Number | None = None
    upper: Number | None = None
    metric: str | None = None
    n_warmup_steps: int = Field(default=0, ge=0)
    interval_steps: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.lower is None and self.upper is None:
            raise ValueError("give lower or upper")
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise ValueError(f"lower {self.lower:g} is more than upper {self.upper:g}")
        return self

    def names_metric(self) -> str | None:
        return self.metric

    def build(self) -> BasePruner:
        from optuna.pruners import ThresholdPruner

        return ThresholdPruner(**self.model_dump(exclude={"name", "metric"}))

    def judge(self, case: Case, peers: Peers) -> Decision:
        if case.step < self.n_warmup_steps or not first_of_interval(
            case.values, case.step, n_warmup_steps=self.n_warmup_steps, interval_steps=self.interval_steps
        ):
            return case.on()
        metric, value = self.metric or case.metric, case.last if self.metric is None else case.reported[self.metric]
        if math.isnan(value):
            return case.prune(f"{metric} is not a number", value=value)
        if self.lower is not None and value < self.lower:
            why = f"{metric} {value:.6g} is below the threshold {self.lower:g}"
            return case.prune(why, value=value, cutoff=self.lower)
        if self.upper is not None and value > self.upper:
            why = f"{metric} {value:.6g} is above the threshold {self.upper:g}"
            return case.prune(why, value=value, cutoff=self.upper)
        return case.on(value=value)
