"""Evaluate a run on a new split: the optimism of the epoch choice, and the standard error of a metric."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from hpsearch.objectives.errors import ObjectiveError, wrap_user_errors
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.data.split_rows import Rows, split_halves
from hpsearch.objectives.training.data.splits import Splits
from hpsearch.objectives.training.evaluation.evaluate import RunningMeans, as_floats
from hpsearch.objectives.training.evaluation.metrics import Metrics, as_metrics
from hpsearch.objectives.training.evaluation.running_metrics import aggregate_over_ranks
from hpsearch.objectives.training.evaluation.step import Step
from hpsearch.objectives.training.loop.prepare import is_resplit
from hpsearch.objectives.training.ranks import SINGLE_PROCESS, Ranks
from hpsearch.objectives.training.result import ResplitScore

if TYPE_CHECKING:
    from hpsearch.objectives.objective import Objective


class HalfSelection(TypedDict):
    """Epoch (0-based) with the best `value` on one half of the validation samples; `score` of the other half."""

    epoch: int
    value: float
    score: float


@dataclass
class _Half:
    metrics: Metrics
    means: RunningMeans
    value: float | None = None  # result of `Objective.evaluate`, if this contains the metric


class CrossFit:
    """Optimism of the best epoch's value, which was selected on the samples that score it.

    Each half of the validation samples selects an epoch, which the other half scores (cross-fitting, Stone 1974,
    *Journal of the Royal Statistical Society* B 36). The difference of both is the optimism of n / 2 samples. It is
    proportional to the standard deviation of the values, so the optimism of all n samples is smaller by sqrt(2).

    The scores of the halves themselves are not used: metrics such as recall@k or the Wasserstein distance are
    properties of a set, and worse or better on a smaller set. This effect cancels in the difference.

    Args:
        cut: number of samples in the first half, which come before the samples of the second half.
        metric: metric that selects the epochs.
        maximize: whether higher values of the metric are better.
        metrics: metrics of each half, on the device.
        device: device of the run.
        ranks: ranks that evaluate together.
    """

    def __init__(
        self,
        cut: int,
        *,
        metric: str,
        maximize: bool,
        metrics: list[Metrics],
        device: torch.device,
        ranks: Ranks = SINGLE_PROCESS,
    ) -> None:
        self.first_half_size = cut
        self.metric, self._sign = metric, 1.0 if maximize else -1.0
        self._device, self._ranks = device, ranks
        self._metrics = metrics
        self._halves: list[_Half] = []
        self.choices: list[HalfSelection | None] = [None, None]
        self.undefined_reason: str | None = (
            None  # reason why a half has no value, and the optimism is therefore unknown
        )

    def reset(self) -> None:
        """Reset the sums before the validation of an epoch."""
        for metrics in self._metrics:
            metrics.reset()
        self._halves = [_Half(metrics, RunningMeans(self._device)) for metrics in self._metrics]

    def add(self, step: Step, rows: range) -> None:
        """Add the result of a batch, whose samples at `rows` are all in the same half."""
        half = self._halves[int(rows.start >= self.first_half_size)]
        half.means.add(step, len(rows))
        if rows and step.outputs is not None:
            half.metrics.update(step.outputs, step.targets)

    def mark_undefined(self, reason: str) -> None:
        """Record the reason for which the halves have no value; the optimism is unknown then."""
        self.undefined_reason = reason.partition("\n")[0]

    def add_values(self, values: Sequence[float]) -> None:
        """Add the value of the metric for each half, from `Objective.evaluate`."""
        for half, value in zip(self._halves, values, strict=True):
            half.value = value

    @torch.inference_mode()
    def update_selection(self, epoch: int) -> None:
        """Update the selected epoch of each half after the validation of `epoch`."""
        try:
            found = {str(number): self._compute_value(half) for number, half in enumerate(self._halves)}
        except (ObjectiveError, ValueError, KeyError) as error:  # a half may lack a class that the metric needs
            self.mark_undefined(str(error))
            return
        values = self._ranks.broadcast_object(as_floats(found))
        for number in range(2):
            value, before = values[str(number)], self.choices[number]
            if before is None or self._is_better(value, before["value"]):
                self.choices[number] = {"epoch": epoch, "value": value, "score": values[str(1 - number)]}
        self._halves = []

    def _compute_value(self, half: _Half) -> Any:
        if half.value is not None:
            return half.value
        return {**half.means.compute(self._ranks), **half.metrics.compute()}[self.metric]

    def _is_better(self, value: float, other: float) -> bool:
        return math.isnan(other) or self._sign * value > self._sign * other

    @property
    def optimism(self) -> float | None:
        """The amount by which the best epoch's value is too high (too low if lower is better); None if unknown."""
        choices = [choice for choice in self.choices if choice is not None]
        if self.undefined_reason is not None or len(choices) < 2:
            return None
        optimism = math.fsum(choice["value"] - choice["score"] for choice in choices) / 2 / math.sqrt(2)
        return optimism if math.isfinite(optimism) else None

    @property
    def epochs(self) -> list[int]:
        """Epochs that the halves selected, 0-based."""
        return [choice["epoch"] for choice in self.choices if choice is not None]

    def state_dict(self) -> dict[str, Any]:
        """Return the selected epochs, and the reason if the optimism is unknown, as plain values."""
        return {"choices": list(self.choices), "refused": self.undefined_reason}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.choices, self.undefined_reason = state["choices"], state["refused"]


HALF_SAMPLES = 16  # with 4 runs, this number gives a standard error with a relative error of 9 %
_MIN_BLOCKS = 4  # minimum number of samples or groups for a standard error


def estimate_error(value: Callable[[Tensor], float], samples: int, blocks: Rows | None, seed: int) -> float | None:
    """Return the standard error of a value from random halves of the samples; None if undefined.

    This is the delete-half jackknife (Shao and Wu 1989, *Annals of Statistics* 17): the standard deviation of the
    values of random halves, without replacement, estimates the standard error of the value of all samples. Unlike a
    bootstrap, it draws no sample twice: a copy would be the nearest neighbor of its sample in metrics such as recall@k.

    Args:
        value: function that computes the value from the samples at some positions. Halves for which it raises an error
            are skipped, for example halves with a single class.
        samples: number of samples.
        blocks: group number of each sample [n]; groups stay together. None treats samples as independent.
        seed: seed of the halves.
    """
    rng = np.random.default_rng(seed)
    numbers = np.arange(samples) if blocks is None else np.unique(blocks, return_inverse=True)[1]
    n_blocks = int(numbers.max()) + 1
    if n_blocks < _MIN_BLOCKS:
        return None
    found = []
    for _ in range(HALF_SAMPLES):
        rows = np.flatnonzero(rng.permutation(n_blocks)[numbers] < n_blocks // 2)
        try:
            found.append(value(torch.from_numpy(rows)))
        except (ObjectiveError, ValueError, RuntimeError, KeyError):  # the half lacks data that the metric needs
            continue
    finite = [number for number in found if math.isfinite(number)]
    if len(finite) < HALF_SAMPLES / 2:
        return None
    return statistics.stdev(finite) * math.sqrt((n_blocks // 2) / (n_blocks - n_blocks // 2))


@dataclass
class ResplitEvaluation:
    """Evaluation of a run on a new train/validation split.

    Attributes:
        seed: seed of the split.
        has_new_split: whether the train/validation split is new; False if `data()` returns a fixed split.
        sizes: numbers of training, validation and test samples.
        rows: order of the validation samples, with the first half first; None if the samples are not halved.
        blocks: group number of each validation sample [n], in the order of `rows`; None if samples are independent.
        cross_fit: evaluation of the halves; None if there are too few samples, or if the samples are a stream.
    """

    seed: int
    has_new_split: bool
    sizes: tuple[int, int, int]
    rows: Tensor | None = None
    blocks: Rows | None = None
    cross_fit: CrossFit | None = None

    def estimate_error(self, value: Callable[[Tensor], float]) -> float | None:
        """Return the standard error of the best epoch's value; None if unknown. See `estimate_error`."""
        return None if self.rows is None else estimate_error(value, len(self.rows), self.blocks, self.seed)

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
