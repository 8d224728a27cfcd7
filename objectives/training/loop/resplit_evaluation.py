"""Evaluation of a run on a new train/validation split, as of finalists."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hpsearch.objectives.errors import wrap_user_errors
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.data.split_rows import Rows, split_halves
from hpsearch.objectives.training.data.splits import Splits
from hpsearch.objectives.training.evaluation.metrics import Metrics, as_metrics
from hpsearch.objectives.training.evaluation.running_metrics import aggregate_over_ranks
from hpsearch.objectives.training.evaluation.standard_error import estimate_error
from hpsearch.objectives.training.loop.cross_fit import CrossFit
from hpsearch.objectives.training.loop.prepare import is_resplit
from hpsearch.objectives.training.ranks import Ranks
from hpsearch.objectives.training.result import ResplitScore

if TYPE_CHECKING:
    from hpsearch.objectives.objective import Objective


@dataclass
class ResplitEvaluation:
    """Evaluation of a run on a new train/validation split.

    Attributes:
        seed: seed of the split.
        has_new_split: whether the train/validation split is new; False if `data()` returns a fixed split.
        sizes: numbers of training, validation and test samples.
        rows: order of the validation samples, with the first half first; None if the samples are not halved.
        blocks: group number of each validation sample [n], in the order of `rows`; None if samples are independent.
        strata: category of each validation sample [n], in the order of `rows`; None if the split is not stratified.
        cross_fit: evaluation of the halves; None if there are too few samples, or if the samples are a stream.
    """

    seed: int
    has_new_split: bool
    sizes: tuple[int, int, int]
    rows: Tensor | None = None
    blocks: Rows | None = None
    strata: Rows | None = None
    cross_fit: CrossFit | None = None

    def estimate_error(self, value: Callable[[Tensor], float]) -> float | None:
        """Return the standard error of the best epoch's value; None if unknown. See `estimate_error`."""
        if self.rows is None:
            return None
        return estimate_error(value, len(self.rows), self.blocks, self.seed, self.strata)

    def score(self, best_value: float, error: float | None) -> ResplitScore:
        """Return the best epoch's value without its optimism; with it if the samples cannot be halved."""
        cross_fit = self.cross_fit
        optimism = None if cross_fit is None else cross_fit.optimism
        return ResplitScore(
            value=best_value - (optimism or 0.0),
            optimism=optimism,
            error=error,
            epochs=() if cross_fit is None or optimism is None else tuple(cross_fit.epochs),
            has_new_split=self.has_new_split,
            sizes=self.sizes,
        )


def build_resplit_evaluation(
    objective: Objective, splits: Splits, metrics: Metrics, plan: RunPlan, *, device: torch.device, ranks: Ranks
) -> ResplitEvaluation:
    """Build the evaluation of a run on a new split.

    Args:
        objective: objective of the run.
        splits: the new split.
        metrics: metrics of the run, before they aggregate over ranks.
        plan: plan of the run, with the seed of the split.
        device: device of the run.
        ranks: ranks that train together.

    Raises:
        ObjectiveError: the objective always returns the same metrics object, and this object cannot be copied.
    """
    seed = plan.resplit_seed or 0
    samples, y, blocks = len(splits.val), splits.val.y, splits.blocks
    if blocks is not None and len(blocks.numbers) != samples:  # the objective has filtered the samples
        blocks = None
    strata = splits.strata if splits.strata is not None and len(splits.strata) == samples else None
    classes = isinstance(y, Tensor) and y.ndim == 1 and not y.dtype.is_floating_point
    halves = None if splits.val.is_stream else split_halves(y.numpy() if classes else None, samples, blocks, seed)
    with wrap_user_errors(f"{type(objective).__name__}.metrics, called again for the halves of the validation split"):
        copies = [_copy_metrics(objective, splits, metrics, device) for _ in range(2)]
        halved_metrics = [aggregate_over_ranks(copied, ranks) for copied in copies]
    evaluation = ResplitEvaluation(
        seed=seed,
        has_new_split=is_resplit(objective, plan.split_seed, splits),
        sizes=(len(splits.train), samples, len(splits.test)),
    )
    if halves is not None:
        rows = np.concatenate(halves)
        evaluation.rows = torch.from_numpy(rows)
        evaluation.blocks = None if blocks is None else blocks.numbers[rows]
        evaluation.strata = None if strata is None else strata[rows]
        evaluation.cross_fit = CrossFit(
            len(halves[0]),
            metric=objective.metric,
            maximize=objective.direction == "maximize",
            metrics=halved_metrics,
            device=device,
            ranks=ranks,
        )
    return evaluation


def _copy_metrics(objective: Objective, splits: Splits, metrics: Metrics, device: torch.device) -> Metrics:
    """Return metrics with a separate state: new metrics of the objective, or a copy if it returns the same object."""
    found = as_metrics(objective.metrics(splits.train), objective.metric)
    if found is metrics:
        found = copy.deepcopy(metrics)
    if hasattr(found, "to"):
        found.to(device)
    return found
