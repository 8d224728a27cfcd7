"""Evaluate a run on a new split: the optimism of the epoch choice, and the standard error of a metric."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from hpsearch.objectives.errors import ObjectiveError, wrap_user_errors
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.data.split_rows import Rows, split_halves
from hpsearch.objectives.training.data.splits import Splits
from hpsearch.objectives.training.data.tree import concatenate, index_rows, leaves, tensors, to_cpu, to_device
from hpsearch.objectives.training.evaluation.evaluate import RunningMeans, as_floats
from hpsearch.objectives.training.evaluation.losses import compute_mean_loss
from hpsearch.objectives.training.evaluation.metrics import Metrics, as_metrics
from hpsearch.objectives.training.evaluation.running_metrics import aggregate_over_ranks, disable_rank_sync
from hpsearch.objectives.training.evaluation.step import LossStep, Step, StepFunction, detach_outputs
from hpsearch.objectives.training.loop.prepare import is_resplit
from hpsearch.objectives.training.ranks import SINGLE_PROCESS, Ranks
from hpsearch.objectives.training.result import ResplitScore

if TYPE_CHECKING:
    from hpsearch.objectives.objective import Objective


MAX_OUTPUT_BYTES = 32 << 20  # maximum size of outputs and targets for resampling, which every checkpoint contains


class Outputs(TypedDict):
    """Outputs and targets of samples: positions `rows` of the samples [n], and two trees of tensors [n, ...]."""

    rows: Tensor
    outputs: Any
    targets: Any


class HalfSelection(TypedDict):
    """Epoch (0-based) with the best `value` on one half of the validation samples, and the `score` of the other half."""

    epoch: int
    value: float
    score: float


class BestEpoch(TypedDict):
    """The best value on all validation samples, with the outputs of its epoch.

    `outputs` is None if the outputs are larger than `MAX_OUTPUT_BYTES` or are not tensors.
    """

    value: float
    outputs: Outputs | None


@dataclass
class _Half:
    metrics: Metrics
    means: RunningMeans
    outputs: list[Outputs] | None = field(default_factory=list)


class CrossFit:
    """Optimism of the best epoch's value, which was selected on the samples that score it.

    Each half of the validation samples selects an epoch, which the other half scores (cross-fitting, Stone 1974,
    *Journal of the Royal Statistical Society* B 36). The difference of both is the optimism of n / 2 samples. It is
    proportional to the standard deviation of the values, so the optimism of all n samples is smaller by sqrt(2).

    The scores of the halves themselves are not used: metrics such as recall@k or the Wasserstein distance are
    properties of a set, and worse or better on a smaller set. This effect cancels in the difference.

    Args:
        cut: number of samples in the first half, which come before the samples of the second half.
        samples: number of samples in both halves together.
        metric: metric that selects the epochs.
        maximize: whether higher values of the metric are better.
        metrics: metrics of each half, on the device.
        device: device of the run.
        ranks: ranks that evaluate together.
    """

    def __init__(
        self,
        cut: int,
        samples: int,
        *,
        metric: str,
        maximize: bool,
        metrics: list[Metrics],
        device: torch.device,
        ranks: Ranks = SINGLE_PROCESS,
    ) -> None:
        self.first_half_size, self._samples = cut, samples
        self.metric, self._sign = metric, 1.0 if maximize else -1.0
        self._device, self._ranks = device, ranks
        self._metrics = metrics
        self._halves: list[_Half] = []
        self.choices: list[HalfSelection | None] = [None, None]
        self.best: BestEpoch | None = None
        self.refused: str | None = None  # reason why a half has no value, and the optimism is therefore unknown

    def reset(self) -> None:
        """Reset the sums before the validation of an epoch."""
        for metrics in self._metrics:
            metrics.reset()
        self._halves = [_Half(metrics, RunningMeans(self._device)) for metrics in self._metrics]

    def add(self, step: Step, rows: range) -> None:
        """Add the result of a batch, whose samples at `rows` are all in the same half."""
        half = self._halves[int(rows.start >= self.first_half_size)]
        half.means.add(step, len(rows))
        if not rows or step.outputs is None:
            return
        half.metrics.update(step.outputs, step.targets)
        if half.outputs is None:
            return
        found = _per_sample(step, rows)
        if (
            found is None
            or sum(part.nbytes for _, part in tensors(found)) / len(rows) * self._samples > MAX_OUTPUT_BYTES
        ):
            half.outputs = None
        else:
            half.outputs.append(found)

    @torch.inference_mode()
    def update_selection(self, epoch: int, whole: float) -> None:
        """Update the selected epochs after the validation of `epoch`; `whole` is the value on all samples."""
        try:
            found = {
                str(number): {**half.means.compute(self._ranks), **half.metrics.compute()}[self.metric]
                for number, half in enumerate(self._halves)
            }
        except (ObjectiveError, ValueError, KeyError) as error:  # a half may lack a class that the metric needs
            self.refused = str(error).partition("\n")[0]
            return
        values = self._ranks.broadcast_object(as_floats(found))
        for number in range(2):
            value, before = values[str(number)], self.choices[number]
            if before is None or self._is_better(value, before["value"]):
                self.choices[number] = {"epoch": epoch, "value": value, "score": values[str(1 - number)]}
        if self.best is None or self._is_better(whole, self.best["value"]):
            self.best = {"value": whole, "outputs": self._gather([half.outputs for half in self._halves])}
        self._halves = []

    def _is_better(self, value: float, other: float) -> bool:
        return math.isnan(other) or self._sign * value > self._sign * other

    def _gather(self, kept: list[list[Outputs] | None]) -> Outputs | None:
        """Return the outputs of all ranks on the CPU, in sample order; None if a rank has discarded its outputs."""
        by_rank = self._ranks.all_gather_object(to_cpu(kept))
        halves = [half for rank in by_rank for half in rank]
        parts = [outputs for half in halves for outputs in half or ()]
        if not parts or any(half is None for half in halves):
            return None
        whole: Outputs = concatenate(parts)
        found: Outputs = index_rows(whole, whole["rows"].argsort())
        return found

    @property
    def optimism(self) -> float | None:
        """By how much the best epoch's value is too high, or too low if lower is better; None if unknown."""
        choices = [choice for choice in self.choices if choice is not None]
        if self.refused is not None or len(choices) < 2:
            return None
        optimism = math.fsum(choice["value"] - choice["score"] for choice in choices) / 2 / math.sqrt(2)
        return optimism if math.isfinite(optimism) else None

    @property
    def epochs(self) -> list[int]:
        """Epochs that the halves selected, 0-based."""
        return [choice["epoch"] for choice in self.choices if choice is not None]

    def compute_error(self, compute_metric: Callable[[Outputs], float], blocks: Rows | None, seed: int) -> float | None:
        """Return the standard error of the best epoch's value; None if unknown. For parameters see `estimate_error`."""
        if self.best is None or (outputs := self.best["outputs"]) is None:
            return None
        own = None if blocks is None else blocks[outputs["rows"].numpy()]
        return estimate_error(compute_metric, to_device(outputs, self._device), own, seed)

    def state_dict(self) -> dict[str, Any]:
        """Return the selected epochs, and the reason if the optimism is unknown, as plain values and tensors."""
        return {"choices": list(self.choices), "best": self.best, "refused": self.refused}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.choices, self.refused = state["choices"], state["refused"]
        self.best = state.get("best")  # missing in checkpoints of earlier versions


def _per_sample(step: Step, rows: range) -> Outputs | None:
    """Return the outputs of a batch if they are tensors with one row per sample, else None."""
    for tree in (step.outputs, step.targets):
        found = [leaf for _, leaf in leaves(tree)]
        if not found or any(not isinstance(leaf, Tensor) or leaf.shape[:1] != (len(rows),) for leaf in found):
            return None
    return {"rows": torch.tensor(rows), "outputs": detach_outputs(step.outputs), "targets": step.targets}


HALF_SAMPLES = 100  # this number gives a standard error with a relative error of 7 %
_MIN_BLOCKS = 4  # minimum number of samples or blocks for a standard error
_MIN_VALUE_SHARE = 0.5  # minimum share of the half-samples that have a value


def estimate_error(value: Callable[[Outputs], float], outputs: Outputs, blocks: Rows | None, seed: int) -> float | None:
    """Return the standard error of a value from random halves of the samples; None if undefined.

    This is the delete-half jackknife (Shao and Wu 1989, *Annals of Statistics* 17): the standard deviation of the
    values of random halves, without replacement, estimates the standard error of the value of all samples. Unlike a
    bootstrap, it draws no sample twice: a copy would be the nearest neighbor of its sample in metrics such as recall@k.

    Args:
        value: function that computes the value from samples. Halves for which it raises an error are skipped, for
            example halves with a single class.
        outputs: outputs and targets of the samples.
        blocks: group number of each sample [n]; groups stay together. None treats samples as independent.
        seed: seed of the halves.
    """
    rng = np.random.default_rng(seed)
    numbers = np.arange(len(outputs["rows"])) if blocks is None else np.unique(blocks, return_inverse=True)[1]
    n_blocks = int(numbers.max()) + 1
    if n_blocks < _MIN_BLOCKS:
        return None
    found = []
    for _ in range(HALF_SAMPLES):
        rows = np.flatnonzero(rng.permutation(n_blocks)[numbers] < n_blocks // 2)
        try:
            found.append(value(index_rows(outputs, torch.from_numpy(rows))))
        except (ObjectiveError, ValueError, RuntimeError, KeyError):  # the half lacks data that the metric needs
            continue
    finite = [number for number in found if math.isfinite(number)]
    if len(finite) < max(2, _MIN_VALUE_SHARE * HALF_SAMPLES):
        return None
    return statistics.stdev(finite) * math.sqrt((n_blocks // 2) / (n_blocks - n_blocks // 2))


def bind_metric(metric: str, metrics: Metrics, step_function: StepFunction) -> Callable[[Outputs], float] | None:
    """Return a function that computes a metric from outputs; None if the metric needs whole batches.

    Args:
        metric: name of the metric.
        metrics: metrics that include `metric`; not used if `metric` is "loss".
        step_function: step function of the run.
    """
    if metric == "loss" and not isinstance(step_function, LossStep):
        return None

    @torch.inference_mode()
    def compute_metric(kept: Outputs) -> float:
        if metric == "loss" and isinstance(step_function, LossStep):
            return float(compute_mean_loss(step_function.loss, kept["outputs"], kept["targets"], len(kept["rows"])))
        metrics.reset()
        metrics.update(kept["outputs"], kept["targets"])
        return float(metrics.compute()[metric])

    return compute_metric


@dataclass
class ResplitEvaluation:
    """Evaluation of a run on a new train/validation split.

    Attributes:
        seed: seed of the split.
        has_new_split: whether the train/validation split is new; False if `data()` returns a fixed split.
        sizes: numbers of training, validation and test samples.
        metrics: a copy of the run's metrics, for the standard error.
        rows: order of the validation samples, with the first half first; None if the samples are not halved.
        blocks: group number of each validation sample [n], in the order of `rows`; None if samples are independent.
        cross_fit: evaluation of the halves; None if there are too few samples, or if the samples are a stream.
    """

    seed: int
    has_new_split: bool
    sizes: tuple[int, int, int]
    metrics: Metrics
    rows: Tensor | None = None
    blocks: Rows | None = None
    cross_fit: CrossFit | None = None

    def score(self, best_value: float, step_function: StepFunction) -> ResplitScore:
        """Return the best epoch's value without its optimism; with it if the samples cannot be halved."""
        cross_fit, error = self.cross_fit, None
        optimism = None if cross_fit is None else cross_fit.optimism
        if cross_fit and (compute := bind_metric(cross_fit.metric, self.metrics, step_function)) is not None:
            error = cross_fit.compute_error(compute, self.blocks, self.seed)
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
        copied, *others = (_copy_metrics(objective, splits, metrics, device) for _ in range(3))
        halved_metrics = [aggregate_over_ranks(other, ranks) for other in others]
    evaluation = ResplitEvaluation(
        seed=seed,
        has_new_split=is_resplit(objective, plan.split_seed, splits),
        sizes=(len(splits.train), samples, len(splits.test)),
        metrics=disable_rank_sync(copied),
    )
    if halves is not None:
        rows = np.concatenate(halves)
        evaluation.rows = torch.from_numpy(rows)
        evaluation.blocks = None if blocks is None else blocks.numbers[rows]
        evaluation.cross_fit = CrossFit(
            len(halves[0]),
            samples,
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
