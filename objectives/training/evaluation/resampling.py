"""How far a value is from what other samples of the same kind would give: the bootstrap over samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import numpy as np
import torch

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.data.split import Rows
from hpsearch.objectives.training.evaluation.cross_fit import Outputs
from hpsearch.objectives.training.evaluation.losses import mean
from hpsearch.objectives.training.evaluation.metrics import Metrics
from hpsearch.objectives.training.evaluation.step import LossStep, Stepping

RESAMPLES = 100  # a standard error of them is itself within 7 %
_FEWEST = 4  # samples or blocks: of fewer the spread of what others would give is not known
_ENOUGH = 0.5  # of them must have a value


def standard_error(value: Callable[[Outputs], float], outputs: Outputs, blocks: Rows | None, seed: int) -> float | None:
    """The standard error of a value by its samples (Efron 1979, *Annals of Statistics* 7); None where it has none.

    Args:
        value: of samples; one that it refuses, as those of a single class, is left out.
        outputs: of the samples.
        blocks: numbers of what belongs together [n], which is drawn together; None where each stands for itself.
        seed: of the draws.
    """
    rng = np.random.default_rng(seed)
    numbers = np.arange(len(outputs.rows)) if blocks is None else blocks
    order = np.argsort(numbers, kind="stable")
    _, starts, sizes = np.unique(numbers[order], return_index=True, return_counts=True)
    if len(starts) < _FEWEST:
        return None
    found = []
    for _ in range(RESAMPLES):
        drawn = rng.integers(len(starts), size=len(starts))
        lengths = sizes[drawn]
        first = np.repeat(starts[drawn] - np.cumsum(lengths) + lengths, lengths)
        rows = order[first + np.arange(int(lengths.sum()))]
        try:
            found.append(value(outputs.take(torch.from_numpy(rows))))
        except (ObjectiveError, ValueError, RuntimeError, KeyError):  # a metric of samples that lack what it needs
            continue
    finite = [number for number in found if math.isfinite(number)]
    return statistics.stdev(finite) if len(finite) >= max(2, _ENOUGH * RESAMPLES) else None


def value_of(metric: str, metrics: Metrics, stepping: Stepping) -> Callable[[Outputs], float] | None:
    """What judges samples by a metric; None where it is measured by whole batches.

    Args:
        metric: its name.
        metrics: with that name among them; for the loss any.
        stepping: of the run.
    """
    if metric == "loss" and not isinstance(stepping, LossStep):
        return None

    @torch.inference_mode()
    def judged(outputs: Outputs) -> float:
        if metric == "loss" and isinstance(stepping, LossStep):
            return float(mean(stepping.loss, outputs.outputs, outputs.targets, len(outputs.rows)))
        metrics.reset()
        metrics.update(outputs.outputs, outputs.targets)
        return float(metrics.compute()[metric])

    return judged
