"""Data that is drawn anew in each epoch: resampling and cross-fitting."""

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

from hpsearch.objectives.errors import ObjectiveError, users_code
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.data.division import Rows, halved
from hpsearch.objectives.training.data.splits import Splits
from hpsearch.objectives.training.data.tree import concatenated, leaves, moved, on_cpu, taken, tensors
from hpsearch.objectives.training.evaluation.evaluate import Means, as_floats
from hpsearch.objectives.training.evaluation.losses import mean
from hpsearch.objectives.training.evaluation.metrics import Metrics, as_metrics
from hpsearch.objectives.training.evaluation.running import of_this_rank, over_ranks
from hpsearch.objectives.training.evaluation.step import LossStep, Step, Stepping, detached
from hpsearch.objectives.training.loop.prepared import is_divided_anew
from hpsearch.objectives.training.ranks import ALONE, Ranks
from hpsearch.objectives.training.result import FreshScore

if TYPE_CHECKING:
    from hpsearch.objectives.objective import Objective


MOST = 32 << 20  # bytes of outputs and targets that are kept to be resampled: they are in every checkpoint


class Outputs(TypedDict):
    """Outputs and targets of samples: positions `rows` of the samples [n], and two trees of tensors [n, ...]."""

    rows: Tensor
    outputs: Any
    targets: Any


class Choice(TypedDict):
    """The epoch (0-based) that one half chose by its own value, with the score and the outputs of the other half.

    `outputs` is None if they are too large to keep, or have other parts than tensors.
    """

    epoch: int
    value: float
    score: float
    outputs: Outputs | None


@dataclass
class _Half:
    metrics: Metrics
    means: Means
    kept: list[Outputs] | None = field(default_factory=list)


class CrossFit:
    """Judges the halves of the validation samples epoch by epoch.

    Args:
        cut: how many samples, the first ones, are the first half.
        samples: how many there are.
        metric: that decides.
        maximize: whether higher is better.
        metrics: of each half, on the device.
        device: of the run.
        ranks: that judge together.
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
        ranks: Ranks = ALONE,
    ) -> None:
        self.cut, self._samples = cut, samples
        self.metric, self._sign = metric, 1.0 if maximize else -1.0
        self._device, self._ranks = device, ranks
        self._metrics = metrics
        self._halves: list[_Half] = []
        self.choices: list[Choice | None] = [None, None]
        self.refused: str | None = None  # why a half has no value: then there is no score of halves

    def begin(self) -> None:
        """Before an epoch is judged."""
        for metrics in self._metrics:
            metrics.reset()
        self._halves = [_Half(metrics, Means(self._device)) for metrics in self._metrics]

    def add(self, step: Step, rows: range) -> None:
        """Adds a batch of one of the halves."""
        number = int(rows.start >= self.cut)
        half = self._halves[number]
        half.means.add(step, len(rows))
        if not rows or step.outputs is None:
            return
        half.metrics.update(step.outputs, step.targets)
        if half.kept is None:
            return
        found = _per_sample(step, rows)
        if found is None or sum(part.nbytes for _, part in tensors(found)) / len(rows) * self._samples > MOST:
            half.kept = None
        else:
            half.kept.append(found)

    @torch.inference_mode()
    def end(self, epoch: int) -> None:
        """After it was judged: each half has chosen it, or has not."""
        try:
            found = {
                str(number): {**half.means.compute(self._ranks), **half.metrics.compute()}[self.metric]
                for number, half in enumerate(self._halves)
            }
        except (ObjectiveError, ValueError, KeyError) as error:  # a half lacks what the metric needs, as a class
            self.refused = str(error).partition("\n")[0]
            return
        values = self._ranks.told(as_floats(found))
        for number in range(2):
            value, score, before = values[str(number)], values[str(1 - number)], self.choices[number]
            if before is None or math.isnan(before["value"]) or self._sign * value > self._sign * before["value"]:
                outputs = self._gathered(self._halves[1 - number].kept)
                self.choices[number] = {"epoch": epoch, "value": value, "score": score, "outputs": outputs}
        self._halves = []

    def _gathered(self, kept: list[Outputs] | None) -> Outputs | None:
        """The outputs of all ranks, on the CPU, in the order of the samples; None where one of them kept none."""
        each = self._ranks.each(on_cpu(kept))
        parts = [outputs for part in each for outputs in part or ()]
        if not parts or any(part is None for part in each):
            return None
        whole: Outputs = concatenated(parts)
        found: Outputs = taken(whole, whole["rows"].argsort())
        return found

    @property
    def score(self) -> float | None:
        """The mean of what both halves score at the other's epoch; None before the first, or where one has no value."""
        if self.refused is not None:
            return None
        scores = [choice["score"] for choice in self.choices if choice is not None]
        return math.fsum(scores) / 2 if len(scores) == 2 and all(map(math.isfinite, scores)) else None

    @property
    def epochs(self) -> list[int]:
        """The epochs that the halves chose, 0-based."""
        return [choice["epoch"] for choice in self.choices if choice is not None]

    def error(self, judge: Callable[[Outputs], float], blocks: Rows | None, seed: int) -> float | None:
        """The standard error of the score by the samples that it was measured on, from that of each half.

        For the parameters see `standard_error`; `blocks` are of all samples.
        """
        errors = []
        for choice in self.choices:
            if choice is None or (outputs := choice["outputs"]) is None:
                return None
            own = None if blocks is None else blocks[outputs["rows"].numpy()]
            errors.append(standard_error(judge, moved(outputs, self._device), own, seed))
        known = [error for error in errors if error is not None]
        return math.hypot(*known) / 2 if len(known) == 2 else None

    def state_dict(self) -> dict[str, Any]:
        """The choices, and why there may be none, as plain values and tensors."""
        return {"choices": list(self.choices), "refused": self.refused}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        self.choices, self.refused = state["choices"], state["refused"]


def _per_sample(step: Step, rows: range) -> Outputs | None:
    """The outputs of a batch, where they can be taken sample by sample."""
    for tree in (step.outputs, step.targets):
        found = [leaf for _, leaf in leaves(tree)]
        if not found or any(not isinstance(leaf, Tensor) or leaf.shape[:1] != (len(rows),) for leaf in found):
            return None
    return {"rows": torch.tensor(rows), "outputs": detached(step.outputs), "targets": step.targets}


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
    numbers = np.arange(len(outputs["rows"])) if blocks is None else blocks
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
            found.append(value(taken(outputs, torch.from_numpy(rows))))
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
            return float(mean(stepping.loss, outputs["outputs"], outputs["targets"], len(outputs["rows"])))
        metrics.reset()
        metrics.update(outputs["outputs"], outputs["targets"])
        return float(metrics.compute()[metric])

    return judged


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
    metrics: Metrics
    rows: Tensor | None = None
    blocks: Rows | None = None
    cross_fit: CrossFit | None = None

    def score(self, best_value: float, stepping: Stepping) -> FreshScore:
        """The score of the run, by its best epoch where the validation samples cannot be halved."""
        halves, error = self.cross_fit, None
        value = None if halves is None else halves.score
        if halves is not None and (judge := value_of(halves.metric, self.metrics, stepping)) is not None:
            error = halves.error(judge, self.blocks, self.division)
        return FreshScore(
            value=best_value if value is None else value,
            error=error,
            epochs=() if halves is None or value is None else tuple(halves.epochs),
            divided=self.divided,
            sizes=self.sizes,
        )


def build_fresh(
    objective: Objective, splits: Splits, metrics: Metrics, plan: RunPlan, *, device: torch.device, ranks: Ranks
) -> Fresh:
    """What the run on a fresh division needs.

    Args:
        objective: that is trained.
        splits: of the division.
        metrics: of the run, before they are made to sum over ranks.
        plan: with the seed of the division.
        device: of the run.
        ranks: that train together.

    Raises:
        ObjectiveError: the metrics are one object, which cannot be copied.
    """
    division = plan.division or 0
    samples, y, blocks = len(splits.val), splits.val.y, splits.blocks
    if blocks is not None and len(blocks.numbers) != samples:  # somebody took a part of them
        blocks = None
    classes = isinstance(y, Tensor) and y.ndim == 1 and not y.dtype.is_floating_point
    halves = None if splits.val.is_stream else halved(y.numpy() if classes else None, samples, blocks, division)
    with users_code(f"{type(objective).__name__}.metrics, called anew for the halves of the validation split"):
        copied, *others = (_another(objective, splits, metrics, device) for _ in range(3))
        halved_metrics = [over_ranks(other, ranks) for other in others]
    fresh = Fresh(
        division=division,
        divided=is_divided_anew(objective, plan.split_seed, splits),
        sizes=(len(splits.train), samples, len(splits.test)),
        metrics=of_this_rank(copied),
    )
    if halves is not None:
        rows = np.concatenate(halves)
        fresh.rows = torch.from_numpy(rows)
        fresh.blocks = None if blocks is None else blocks.numbers[rows]
        fresh.cross_fit = CrossFit(
            len(halves[0]),
            samples,
            metric=objective.metric,
            maximize=objective.direction == "maximize",
            metrics=halved_metrics,
            device=device,
            ranks=ranks,
        )
    return fresh


def _another(objective: Objective, splits: Splits, metrics: Metrics, device: torch.device) -> Metrics:
    """Metrics of their own: what the objective gives now, or a copy where that is always the same object."""
    found = as_metrics(objective.metrics(splits.train), objective.metric)
    if found is metrics:
        found = copy.deepcopy(metrics)
    if hasattr(found, "to"):
        found.to(device)
    return found
