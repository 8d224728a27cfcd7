"""The median and percentile stopping rules as Optuna has them, after Golovin et al. 2017 ("Google Vizier", 3.2.2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from optuna.trial import FrozenTrial

from search.pruning.decision import Case, Decision, Grounds, first_of_interval
from search.spec.spec import Median, Percentile


def judge(case: Case, options: Median | Percentile, finished: Callable[[], Sequence[FrozenTrial]]) -> Decision:
    """Compare the trial's best value so far with the finished trials' values at the same epoch.

    Args:
        case: the trial.
        options: the pruner's.
        finished: returns the COMPLETE trials; not called where the epoch is not one at which trials are judged.
    """
    step = case.step
    if step < options.n_warmup_steps or not first_of_interval(
        case.values, step, n_warmup_steps=options.n_warmup_steps, interval_steps=options.interval_steps
    ):
        return case.on()
    trials = finished()
    if len(trials) < max(1, options.n_startup_trials):
        return case.on()
    best = _best(case.values.values(), maximize=case.maximize)
    if best is None:
        return case.prune(f"no {case.metric} so far is a number", value=math.nan)
    at_step = [t.intermediate_values[step] for t in trials if step in t.intermediate_values]
    numbers = [value for value in at_step if not math.isnan(value)]
    # As in Optuna, the minimum counts the values that are not numbers, too.
    if len(at_step) < options.n_min_trials or not numbers:
        return case.on()
    keep = 50.0 if isinstance(options, Median) else options.percentile
    with np.errstate(invalid="ignore"):  # between two infinities there is no number, and no cut-off
        cutoff = float(np.percentile(numbers, 100 - keep if case.maximize else keep))
    grounds: Grounds = {"value": best, "cutoff": cutoff, "peers": len(numbers)}
    if not case.worse(best, cutoff):
        return case.on(**grounds)
    among = f"{len(numbers)} finished trials at that epoch"
    what = f"the median of {among}" if isinstance(options, Median) else f"which the best {keep:g} % of {among} reach"
    return case.prune(f"{case.compared(best, cutoff, best=True)}, {what}", **grounds)


def _best(values: Iterable[float], *, maximize: bool) -> float | None:
    """Return the best value that is a number, or None."""
    numbers = [value for value in values if not math.isnan(value)]
    if not numbers:
        return None
    return max(numbers) if maximize else min(numbers)
