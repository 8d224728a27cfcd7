"""Pruning at an absolute bound, as Optuna's ThresholdPruner."""

from __future__ import annotations

import math

from search.pruning.decision import Case, Decision, first_of_interval
from search.spec.spec import Threshold


def judge(case: Case, options: Threshold) -> Decision:
    """Compare the trial's last value with the bounds; which way is better does not matter."""
    if case.step < options.n_warmup_steps or not first_of_interval(
        case.values, case.step, n_warmup_steps=options.n_warmup_steps, interval_steps=options.interval_steps
    ):
        return case.on()
    value = case.last
    if math.isnan(value):
        return case.prune(f"{case.metric} is not a number", value=value)
    if options.lower is not None and value < options.lower:
        why = f"{case.metric} {value:.6g} is below the threshold {options.lower:g}"
        return case.prune(why, value=value, cutoff=options.lower)
    if options.upper is not None and value > options.upper:
        why = f"{case.metric} {value:.6g} is above the threshold {options.upper:g}"
        return case.prune(why, value=value, cutoff=options.upper)
    return case.on(value=value)
