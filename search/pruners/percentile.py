"""The median and percentile stopping rules as Optuna has them, after Golovin et al. 2017 ("Google Vizier", 3.2.2)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from hpsearch.search.kinds import Number
from hpsearch.search.pruners.base import PrunerSpec
from hpsearch.search.pruners.decision import Case, Decision, Grounds, Peers, first_of_interval

if TYPE_CHECKING:
    from optuna.pruners import BasePruner


class _Stopping(PrunerSpec):
    """What the two have in common."""

    n_startup_trials: int = Field(default=5, ge=0)
    n_warmup_steps: int = Field(default=2, ge=0)
    interval_steps: int = Field(default=1, ge=1)
    n_min_trials: int = Field(default=1, ge=1)

    knows_several: ClassVar[bool] = False


class Median(_Stopping):
    """Prune what is worse than the median of the finished trials at the same epoch, Optuna's ``MedianPruner``."""

    name: Literal["median"] = "median"

    def build(self) -> BasePruner:
        from optuna.pruners import MedianPruner

        return MedianPruner(**self.options)

    def judge(self, case: Case, peers: Peers) -> Decision:
        return _compare(case, self, peers, keep=50.0)


class Percentile(_Stopping):
    """Keep the best `percentile` percent at each epoch, Optuna's ``PercentilePruner``."""

    name: Literal["percentile"] = "percentile"
    percentile: Number = Field(default=25.0, ge=0.0, le=100.0)

    def build(self) -> BasePruner:
        from optuna.pruners import PercentilePruner

        return PercentilePruner(**self.options)

    def judge(self, case: Case, peers: Peers) -> Decision:
        return _compare(case, self, peers, keep=self.percentile)


def _compare(case: Case, options: _Stopping, peers: Peers, *, keep: float) -> Decision:
    """Compare the trial's best value so far with that of the best `keep` percent of finished trials at the same epoch.

    Nothing is read where the epoch is not one at which trials are judged.
    """
    step = case.step
    if step < options.n_warmup_steps or not first_of_interval(
        case.values, step, n_warmup_steps=options.n_warmup_steps, interval_steps=options.interval_steps
    ):
        return case.on()
    trials = peers.finished()
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
    import numpy as np  # who only checks a spec does not wait for it

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
