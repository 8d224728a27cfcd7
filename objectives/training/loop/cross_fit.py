"""Evaluate a run on a new split: cross-fitting of validation halves, and bootstrap standard errors."""

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
    """Epoch (0-based) with the best `value` on one half of the validation samples; score and outputs of the other half.

    `outputs` is None if the outputs are larger than `MAX_OUTPUT_BYTES` or are not tensors.
    """

    epoch: int
    value: float
    score: float
    outputs: Outputs | None


@dataclass
class _Half:
    metrics: Metrics
    means: RunningMeans
    outputs: list[Outputs] | None = field(default_factory=list)


class CrossFit:
    """Cross-fitting: each half of the validation samples selects an epoch, which the other half scores.

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
        self.refused: str | None = None  # reason why a half has no value, and cross-fitting therefore no score

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
    def update_selection(self, epoch: int) -> None:
        """Update the selected epoch of each half after the validation of `epoch`."""
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
            value, score, before = values[str(number)], values[str(1 - number)], self.choices[number]
            if before is None or math.isnan(before["value"]) or self._sign * value > self._sign * before["value"]:
                outputs = self._gather(self._halves[1 - number].outputs)
                self.choices[number] = {"epoch": epoch, "value": value, "score": score, "outputs": outputs}
        self._halves = []

    def _gather(self, kept: list[Outputs] | None) -> Outputs | None:
        """Return the outputs of all ranks on the CPU, in sample order; None if a rank has discarded its outputs."""
        by_rank = self._ranks.all_gather_object(to_cpu(kept))
        parts = [outputs for part in by_rank for outputs in part or ()]
        if not parts or any(part is None for part in by_rank):
            return None
        whole: Outputs = concatenate(parts)
        found: Outputs = index_rows(whole, whole["rows"].argsort())
        return found

    @property
    def score(self) -> float | None:
        """Mean score of both halves, each at the epoch that the other half selected; None if a score is not finite."""
        if self.refused is not None:
            return None
        scores = [choice["score"] for choice in self.choices if choice is not None]
        return math.fsum(scores) / 2 if len(scores) == 2 and all(map(math.isfinite, scores)) else None

    @property
    def epochs(self) -> list[int]:
        """Epochs that the halves selected, 0-based."""
        return [choice["epoch"] for choice in self.choices if choice is not None]

    def compute_error(self, compute_metric: Callable[[Outputs], float], blocks: Rows | None, seed: int) -> float | None:
        """Return the standard error of the score, from the standard errors of both halves; None if unknown.

        For the parameters see `estimate_error`. Here `blocks` covers the samples of both halves.
        """
        errors = []
        for choice in self.choices:
            if choice is None or (outputs := choice["outputs"]) is None:
                return None
            own = None if blocks is None else blocks[outputs["rows"].numpy()]
            errors.append(estimate_error(compute_metric, to_device(outputs, self._device), own, seed))
        known = [error for error in errors if error is not None]
        return math.hypot(*known) / 2 if len(known) == 2 else None

    def state_dict(self) -> dict[str, Any]:
        """Return the selected epochs, and the reason if cross-fitting has no score, as plain values and tensors."""
        return {"choices": list(self.choices), "refused": self.refused}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.choices, self.refused = state["choices"], state["refused"]


def _per_sample(step: Step, rows: range) -> Outputs | None:
    """Return the outputs of a batch if they are tensors with one row per sample, else None."""
    for tree in (step.outputs, step.targets):
        found = [leaf for _, leaf in leaves(tree)]
        if not found or any(not isinstance(leaf, Tensor) or leaf.shape[:1] != (len(rows),) for leaf in found):
            return None
    return {"rows": torch.tensor(rows), "outputs": detach_outputs(step.outputs), "targets": step.targets}


BOOTSTRAP_SAMPLES = 100  # this number gives a standard error with a relative error of 7 %
_MIN_BLOCKS = 4  # minimum number of samples or blocks for a standard error
_MIN_VALUE_SHARE = 0.5  # minimum share of the resamples that have a value


def estimate_error(value: Callable[[Outputs], float], outputs: Outputs, blocks: Rows | None, seed: int) -> float | None:
    """Return the bootstrap standard error of a value (Efron 1979, *Annals of Statistics* 7); None if undefined.

    Args:
        value: function that computes the value from samples. Resamples for which it raises an error are skipped, for
            example resamples with a single class.
        outputs: outputs and targets of the samples.
        blocks: group number of each sample [n]; groups are resampled together. None treats samples as independent.
        seed: seed of the resampling.
    """
    rng = np.random.default_rng(seed)
    numbers = np.arange(len(outputs["rows"])) if blocks is None else blocks
    order = np.argsort(numbers, kind="stable")
    _, starts, sizes = np.unique(numbers[order], return_index=True, return_counts=True)
    if len(starts) < _MIN_BLOCKS:
        return None
    found = []
    for _ in range(BOOTSTRAP_SAMPLES):
        drawn = rng.integers(len(starts), size=len(starts))
        lengths = sizes[drawn]
        first = np.repeat(starts[drawn] - np.cumsum(lengths) + lengths, lengths)
        rows = order[first + np.arange(int(lengths.sum()))]
        try:
            found.append(value(index_rows(outputs, torch.from_numpy(rows))))
        except (ObjectiveError, ValueError, RuntimeError, KeyError):  # the resample lacks data that the metric needs
            continue
    finite = [number for number in found if math.isfinite(number)]
    return statistics.stdev(finite) if len(finite) >= max(2, _MIN_VALUE_SHARE * BOOTSTRAP_SAMPLES) else None


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
        metrics: a copy of the run's metrics, for resamples.
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
        """Return the cross-fitted score of the run, or the best epoch's value if the samples cannot be halved."""
        cross_fit, error = self.cross_fit, None
        value = None if cross_fit is None else cross_fit.score
        if cross_fit and (compute := bind_metric(cross_fit.metric, self.metrics, step_function)) is not None:
            error = cross_fit.compute_error(compute, self.blocks, self.seed)
        return ResplitScore(
            value=best_value if value is None else value,
            error=error,
            epochs=() if cross_fit is None or value is None else tuple(cross_fit.epochs),
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
