"""Pruners that end a trial without pausing it first: median, percentile, threshold, patient; and `none`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from hpsearch.search.pruners.base_and_halving import (
    Decision,
    DecisionDetails,
    Halving,
    OtherTrials,
    PrunerSpec,
    PruningContext,
    is_due,
)
from hpsearch.search.spec.kinds import Number

TIE_TOLERANCE = 1e-6  # relative; a mean of two float32 values differs from an equal float32 value by about 1e-7


class _Stopping(PrunerSpec):
    """Options of the pruners that compare a trial with a percentile of other trials."""

    n_startup_trials: int = Field(default=5, ge=0)
    n_warmup_steps: int = Field(default=2, ge=0)
    interval_steps: int = Field(default=1, ge=1)
    n_min_trials: int = Field(default=1, ge=1)

    can_be_multi_objective: ClassVar[bool] = False


class Median(_Stopping):
    """Prune trials that are worse than the median at the same epoch, as Optuna's ``MedianPruner`` does.

    The median is that of the COMPLETE trials.
    """

    name: Literal["median"] = "median"

    def decide(self, case: PruningContext, peers: OtherTrials) -> Decision:
        return _compare(case, self, peers, keep=50.0)


class Percentile(_Stopping):
    """Keep a trial if it is among the best `percentile` percent at each epoch, as Optuna's ``PercentilePruner`` does.

    The trial is compared with the COMPLETE trials.
    """

    name: Literal["percentile"] = "percentile"
    percentile: Number = Field(default=25.0, ge=0.0, le=100.0)

    def decide(self, case: PruningContext, peers: OtherTrials) -> Decision:
        return _compare(case, self, peers, keep=self.percentile)


def _compare(case: PruningContext, options: _Stopping, peers: OtherTrials, *, keep: float) -> Decision:
    """Return the decision by comparison of the trial with the COMPLETE trials at the same epoch.

    The trial's best value so far is compared with the best `keep` percent of their values. Other trials are read only
    at epochs at which trials are compared. Unlike in Optuna, a value that differs from the percentile only by rounding
    is not worse.
    """
    step = case.step
    if not is_due(case, n_warmup_steps=options.n_warmup_steps, interval_steps=options.interval_steps):
        return case.keep()
    trials = peers.get_finished_trials()
    if len(trials) < max(1, options.n_startup_trials):
        return case.keep()
    best = _best_of(case.values.values(), case)
    if math.isnan(best):
        return case.prune(f"{case.metric} is NaN in all epochs", value=math.nan)
    at_step = [t.intermediate_values[step] for t in trials if step in t.intermediate_values]
    numbers = [value for value in at_step if not math.isnan(value)]
    # As in Optuna, trials with the value NaN count towards `n_min_trials`.
    if len(at_step) < options.n_min_trials or not numbers:
        return case.keep()
    import numpy as np  # slow, and not needed to check a spec

    with np.errstate(invalid="ignore"):  # the interpolation between two infinities gives NaN
        cutoff = float(np.percentile(numbers, 100 - keep if case.maximize else keep))
    details: DecisionDetails = {"value": best, "cutoff": cutoff, "peers": len(numbers)}
    is_tied = math.isclose(best, cutoff, rel_tol=TIE_TOLERANCE)
    if is_tied or not case.is_worse(best, cutoff):
        return case.keep(**details)
    among = f"{len(numbers)} finished trials at that epoch"
    limit = f"the median of {among}" if isinstance(options, Median) else f"which the best {keep:g} % of {among} reach"
    return case.prune(f"{case.format_comparison(best, cutoff, best=True)}, {limit}", **details)


class Threshold(PrunerSpec):
    """Prune trials with a value below `lower` or above `upper`, as Optuna's ``ThresholdPruner`` does.

    Both bounds apply regardless of the direction of the metric. The value is that of the study's metric or, if `metric`
    is set, of this objective or constrained metric.
    """

    name: Literal["threshold"] = "threshold"
    lower: Number | None = None
    upper: Number | None = None
    metric: str | None = None
    n_warmup_steps: int = Field(default=0, ge=0)
    interval_steps: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.lower is None and self.upper is None:
            raise ValueError("the pruner threshold has no bound; give the option lower or upper")
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise ValueError(f"lower={self.lower:g} is greater than upper={self.upper:g}; swap the bounds")
        return self

    def get_metric_name(self) -> str | None:
        return self.metric

    def decide(self, case: PruningContext, peers: OtherTrials) -> Decision:
        if not is_due(case, n_warmup_steps=self.n_warmup_steps, interval_steps=self.interval_steps):
            return case.keep()
        metric, value = self.metric or case.metric, case.value if self.metric is None else case.reported[self.metric]
        if math.isnan(value):
            return case.prune(f"{metric} is NaN", value=value)
        low, high = (-math.inf if self.lower is None else self.lower), (math.inf if self.upper is None else self.upper)
        if low <= value <= high:
            return case.keep(value=value)
        side, cutoff = ("below", low) if value < low else ("above", high)
        return case.prune(f"{metric} {value:.6g} is {side} the threshold {cutoff:g}", value=value, cutoff=cutoff)


def _parse(given: object) -> object:
    return None if given is None else PrunerSpec.parse({"name": given} if isinstance(given, str) else given)


class Patient(PrunerSpec):
    """Prune only after `patience` + 1 epochs without improvement, as Optuna's ``PatientPruner`` does.

    The best value of these epochs must be worse than the best earlier value by more than `min_delta`. Then the
    `wrapped` pruner makes the decision; if no pruner is wrapped, the trial is pruned.
    """

    name: Literal["patient"] = "patient"
    can_be_multi_objective: ClassVar[bool] = False
    patience: int = Field(default=3, ge=0)
    min_delta: Number = Field(default=0.0, ge=0)
    wrapped: Annotated[SerializeAsAny[PrunerSpec] | None, BeforeValidator(_parse)] = None

    @model_validator(mode="after")
    def _check_wrapped(self) -> Self:
        if self.wrapped is not None and self.wrapped.get_rung_schedule(1_000_000) is not None:
            raise ValueError(f"the pruner patient cannot wrap {self.wrapped.name}, which pauses trials; wrap another")
        return self

    def fit_to_epochs(self, epochs: int) -> Self:
        wrapped = None if self.wrapped is None else self.wrapped.fit_to_epochs(epochs)
        return self.model_copy(update={"wrapped": wrapped})

    def check_folds(self, folds: int | None) -> None:
        if self.wrapped is not None:
            self.wrapped.check_folds(folds)

    def get_halving(self, study: str, number: int) -> Halving | None:
        return None if self.wrapped is None else self.wrapped.get_halving(study, number)

    def decide(self, case: PruningContext, peers: OtherTrials) -> Decision:
        steps = sorted(case.values)
        before, after = steps[: -self.patience - 1], steps[-self.patience - 1 :]
        if not before:
            return case.keep()
        prior, since = (_best_of((case.values[step] for step in part), case) for part in (before, after))
        cutoff = prior - self.min_delta if case.maximize else prior + self.min_delta
        if not case.is_worse(since, cutoff):
            return case.keep(value=since, cutoff=cutoff)
        compared = case.format_comparison(since, cutoff, best=True)
        why = f"{compared} since epoch {after[0] + 1}; best value before: {prior:.6g}"
        if self.wrapped is None:
            return case.prune(why, value=since, cutoff=cutoff)
        decision = self.wrapped.decide(replace(case, pruner=self.wrapped.name), peers)
        return replace(decision, reason=f"{decision.reason}; {why}") if decision.prune else decision


def _best_of(values: Iterable[float], case: PruningContext) -> float:
    """Return the best value that is not NaN; NaN if all values are NaN."""
    numbers = [value for value in values if not math.isnan(value)]
    if not numbers:
        return math.nan
    return max(numbers) if case.maximize else min(numbers)


class NoPruning(PrunerSpec):
    """Run all epochs of every trial, as Optuna's ``NopPruner`` does."""

    name: Literal["none"] = "none"

    can_prune: ClassVar[bool] = False

    def decide(self, case: PruningContext, peers: OtherTrials) -> Decision:
        return case.keep()
