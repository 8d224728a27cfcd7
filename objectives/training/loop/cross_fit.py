"""Optimism of the choice of the best epoch, from two halves of the validation samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.evaluation.evaluate import RunningMeans, as_floats
from hpsearch.objectives.training.evaluation.metrics import Metrics
from hpsearch.objectives.training.evaluation.step import Step
from hpsearch.objectives.training.ranks import SINGLE_PROCESS, Ranks


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

    @torch.no_grad()
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
