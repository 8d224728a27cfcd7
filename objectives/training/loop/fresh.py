"""A run on a fresh division of the data: it confirms a configuration, and is scored by cross-fitting."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hpsearch.objectives.errors import users_code
from hpsearch.objectives.training.data.division import halved
from hpsearch.objectives.training.data.split import Rows
from hpsearch.objectives.training.data.splits import Splits
from hpsearch.objectives.training.evaluation.across_ranks import of_this_rank, over_ranks
from hpsearch.objectives.training.evaluation.cross_fit import CrossFit, Outputs
from hpsearch.objectives.training.evaluation.metrics import Metrics, as_metrics
from hpsearch.objectives.training.evaluation.resampling import standard_error, value_of
from hpsearch.objectives.training.evaluation.step import Stepping
from hpsearch.objectives.training.loop.prepared import is_divided_anew
from hpsearch.objectives.training.ranks import Ranks
from hpsearch.objectives.training.result import FreshScore

if TYPE_CHECKING:
    from hpsearch.objectives.objective import Objective


@dataclass
class Fresh:
    """What a run on a fresh division has beside others.

    Attributes:
        division: seed of the division.
        divided: whether the data let train and validation be divided anew: `data()` may give fixed parts.
        sizes: how many samples are trained on, validated on, and tested on.
        rows: the order of the validation samples in which the first half comes first; None where they are not halved.
        blocks: numbers of what belongs together [n], in that order; None where each sample stands for itself.
        cross_fit: judges the halves; None where the samples are too few, or come in an order of their own.
        metrics: a copy of the run's, to judge resamples by.
    """

    division: int
    divided: bool
    sizes: tuple[int, int, int]
    rows: Tensor | None
    blocks: Rows | None
    cross_fit: CrossFit | None
    metrics: Metrics

    def score(self, metric: str, best_value: float, stepping: Stepping, device: torch.device) -> FreshScore:
        """The score of the run, by its best epoch where the validation samples cannot be halved."""
        value, error, epochs = None, None, list[int]()
        if self.cross_fit is not None:
            value, epochs = self.cross_fit.score, self.cross_fit.epochs
            judge = value_of(metric, self.metrics, stepping)
            if judge is not None:
                error = self.cross_fit.error(partial(self._error, judge, device))
        return FreshScore(
            value=best_value if value is None else value,
            error=error,
            epochs=tuple(epochs) if value is not None else (),
            divided=self.divided,
            sizes=self.sizes,
        )

    def _error(self, judge: Callable[[Outputs], float], device: torch.device, outputs: Outputs) -> float | None:
        blocks = None if self.blocks is None else self.blocks[outputs.rows.numpy()]
        return standard_error(judge, outputs.to(device), blocks, self.division)


def build_fresh(
    objective: Objective,
    splits: Splits,
    metrics: Metrics,
    *,
    split_seed: int,
    division: int,
    device: torch.device,
    ranks: Ranks,
) -> Fresh:
    """What the run on a fresh division needs.

    Args:
        objective: that is trained.
        splits: of the division.
        metrics: of the run, before they are made to sum over ranks.
        split_seed: of the study.
        division: seed of the division.
        device: of the run.
        ranks: that train together.

    Raises:
        ObjectiveError: the metrics are one object, which cannot be copied.
    """
    samples, y, blocks = len(splits.val), splits.val.y, splits.blocks
    classes = isinstance(y, Tensor) and y.ndim == 1 and not y.dtype.is_floating_point
    halves = None if splits.val.is_stream else halved(y.numpy() if classes else None, samples, blocks, division)
    rows = None if halves is None else torch.from_numpy(np.concatenate(halves))
    with users_code(f"{type(objective).__name__}.metrics, called anew for the halves of the validation split"):
        copied, *others = (_another(objective, splits, metrics, device) for _ in range(3))
        halved_metrics = [over_ranks(other, ranks) for other in others]
    cross_fit = None
    if halves is not None:
        cross_fit = CrossFit(
            len(halves[0]),
            samples,
            metric=objective.metric,
            maximize=objective.direction == "maximize",
            metrics=halved_metrics,
            device=device,
            ranks=ranks,
        )
    known = blocks is not None and len(blocks.numbers) == samples
    return Fresh(
        division=division,
        divided=is_divided_anew(objective, split_seed, splits),
        sizes=(len(splits.train), samples, len(splits.test)),
        rows=rows,
        blocks=blocks.numbers[rows.numpy()] if rows is not None and blocks is not None and known else None,
        cross_fit=cross_fit,
        metrics=of_this_rank(copied),
    )


def _another(objective: Objective, splits: Splits, metrics: Metrics, device: torch.device) -> Metrics:
    """Metrics of their own: what the objective gives now, or a copy where that is always the same object."""
    found = as_metrics(objective.metrics(splits.train), objective.metric)
    if found is metrics:
        found = copy.deepcopy(metrics)
    if hasattr(found, "to"):
        found.to(device)
    return found
