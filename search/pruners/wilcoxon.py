"""The pruner `wilcoxon`, which compares trials on the folds of a cross-validation by a paired test."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from hpsearch.search.pruners.base_and_halving import (
    Decision,
    DecisionDetails,
    OtherTrials,
    PrunerSpec,
    PruningContext,
)
from hpsearch.search.spec.kinds import Number
from hpsearch.storage.attributes import VIOLATIONS


class Wilcoxon(PrunerSpec):
    """Prune trials that are worse than the best trial beyond chance, by a test paired over the folds of `--folds`.

    The test is the one-sided Wilcoxon signed-rank test, by the rules of Optuna's ``WilcoxonPruner``. The reference is
    the best COMPLETE trial within the bounds. Differences of zero are split. A trial is pruned if the p-value is below
    `p_threshold` and its mean is worse than that of the reference. A trial with a value that is not finite is kept.

    Unlike in Optuna, the pairs are the folds of one epoch instead of all reported steps, because the epochs of one
    training are not independent. Each trial is compared at its best epoch so far, so that a single bad epoch does not
    prune it. The smallest p-value of n folds is 2**-n. With five folds, a trial that is worse in all folds has the
    p-value 0.031, and one that is better by the least of the differences has 0.062. The test is repeated after each
    epoch, and folds share training samples, so the probability of a wrong decision is higher than `p_threshold`.
    """

    name: Literal["wilcoxon"] = "wilcoxon"
    can_be_multi_objective: ClassVar[bool] = False
    p_threshold: Number = Field(default=0.1, gt=0, lt=1)
    n_warmup_steps: int = Field(default=2, ge=0)

    def check_folds(self, folds: int | None) -> None:
        if folds is None:
            raise ValueError(f"--pruner {self.name} compares the folds of trials; add --folds, or use --pruner median")
        if (smallest := 0.5**folds) >= self.p_threshold:
            raise ValueError(
                f"pruner.p_threshold {self.p_threshold:g} must be above {smallest:g}, the smallest p-value of {folds} "
                "folds; raise pruner.p_threshold or --folds"
            )

    def decide(self, case: PruningContext, peers: OtherTrials) -> Decision:
        if case.step < self.n_warmup_steps:
            return case.keep()
        trials = [trial for trial in peers.get_finished_trials() if not trial.user_attrs.get(VIOLATIONS)]
        if not trials:
            return case.keep()
        sign = 1 if case.maximize else -1
        reference = max(trials, key=lambda trial: (sign * (trial.value or 0.0), -trial.number))
        curves = (case.values, reference.intermediate_values)
        own_epoch, other_epoch = (_find_best_epoch(curve, sign, last=case.step) for curve in curves)
        if own_epoch is None or other_epoch is None:
            return case.keep()
        value, cutoff = case.values[own_epoch], reference.intermediate_values[other_epoch]
        details: DecisionDetails = {"value": value, "cutoff": cutoff, "peers": 1}
        if not case.is_worse(value, cutoff):
            return case.keep(**details)
        own, others = peers.read_fold_values(own_epoch), peers.read_fold_values(other_epoch, reference)
        if len(own) != len(others):  # a trial that was added with Optuna has no folds
            return case.keep(**details)
        losses = [sign * (other - mine) for mine, other in zip(own, others, strict=True)]
        p = compute_p_value(losses)
        if not p < self.p_threshold:
            return case.keep(**details)
        compared = case.format_comparison(value, cutoff, best=True)
        why = f"{compared} of trial {reference.number}, beyond chance on {len(losses)} folds (p = {p:.2g})"
        return case.prune(why, **details)


def _find_best_epoch(values: Mapping[int, float], sign: int, *, last: int) -> int | None:
    """Return the epoch with the best value up to epoch `last`; None if all values are NaN."""
    epochs = [epoch for epoch, value in values.items() if epoch <= last and not math.isnan(value)]
    return max(epochs, key=lambda epoch: (sign * values[epoch], -epoch), default=None)


def compute_p_value(losses: list[float]) -> float:
    """Return the p-value of the hypothesis that the differences `losses` are not positive; NaN if one is not finite."""
    if not all(map(math.isfinite, losses)):
        return math.nan
    from scipy.stats import wilcoxon  # slow, and not needed to check a spec

    return float(wilcoxon(losses, alternative="greater", zero_method="zsplit").pvalue)
