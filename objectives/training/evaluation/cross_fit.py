"""A run's score that the choice of its epoch does not flatter.

The best of many epochs, chosen by the samples that it is scored on, is too good: its luck was chosen too. So the
validation samples are halved: the epoch is chosen on one half and scored on the other, and the other way round; the
mean of both is the score (Stone 1974, *Cross-validatory choice and assessment of statistical predictions*, JRSS B 36).
Both halves come from the one evaluation that an epoch has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.data.tree import map_tensors, refilled, taken, tensors
from hpsearch.objectives.training.evaluation.evaluate import Means, as_floats
from hpsearch.objectives.training.evaluation.metrics import Metrics
from hpsearch.objectives.training.evaluation.step import Step, detached
from hpsearch.objectives.training.ranks import ALONE, Ranks

MOST = 32 << 20  # bytes of outputs and targets that are kept to be resampled: they are in every checkpoint


@dataclass(frozen=True)
class Outputs:
    """What the model gave for samples, and what it should have.

    Attributes:
        rows: positions of the samples [n].
        outputs, targets: [n, ...], or trees of such.
    """

    rows: Tensor
    outputs: Any
    targets: Any

    def take(self, rows: Tensor) -> Outputs:
        """Those at the positions `rows`."""
        return Outputs(self.rows[rows], taken(self.outputs, rows), taken(self.targets, rows))

    def to(self, device: torch.device | str) -> Outputs:
        """The same on a device."""
        trees = (map_tensors(lambda tensor: tensor.to(device), tree) for tree in (self.outputs, self.targets))
        return Outputs(self.rows, *trees)


@dataclass(frozen=True)
class Choice:
    """An epoch that one half chose.

    Attributes:
        epoch: 0-based.
        value: of the half that chose.
        score: of the other half.
        outputs: of the other half; None where they are too many, or no tensors.
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
        self.cut, self._sizes = cut, (cut, samples - cut)
        self._metric, self._sign = metric, 1.0 if maximize else -1.0
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
        if found is None or _bytes(found) / len(rows) * sum(self._sizes) > MOST:
            half.kept = None
        else:
            half.kept.append(found)

    @torch.inference_mode()
    def end(self, epoch: int) -> None:
        """After it was judged: each half has chosen it, or has not."""
        try:
            found = {
                str(number): {**half.means.compute(self._ranks), **half.metrics.compute()}[self._metric]
                for number, half in enumerate(self._halves)
            }
        except (ObjectiveError, ValueError, KeyError) as error:  # a half lacks what the metric needs, as a class
            self.refused = str(error).partition("\n")[0]
            return
        values = self._ranks.told(as_floats(found))
        for number in range(2):
            value, score, before = values[str(number)], values[str(1 - number)], self.choices[number]
            if before is None or math.isnan(before.value) or self._sign * value > self._sign * before.value:
                self.choices[number] = Choice(epoch, value, score, self._gathered(self._halves[1 - number].kept))
        self._halves = []

    def _gathered(self, kept: list[Outputs] | None) -> Outputs | None:
        """The outputs of all ranks, on the CPU, in the order of the samples; None where one of them kept none."""
        own = None if kept is None else [outputs.to("cpu") for outputs in kept]
        each = self._ranks.each(own)
        parts = [outputs for part in each for outputs in part or ()]
        if not parts or any(part is None for part in each):
            return None
        whole = _joined(parts)
        return whole.take(whole.rows.argsort())

    @property
    def score(self) -> float | None:
        """The mean of what both halves score at the other's epoch; None before the first, or where one has no value."""
        if self.refused is not None:
            return None
        scores = [choice.score for choice in self.choices if choice is not None]
        return math.fsum(scores) / 2 if len(scores) == 2 and all(map(math.isfinite, scores)) else None

    @property
    def epochs(self) -> list[int]:
        """The epochs that the halves chose, 0-based."""
        return [choice.epoch for choice in self.choices if choice is not None]

    def error(self, resampled: Callable[[Outputs], float | None]) -> float | None:
        """The standard error of the score by the samples that it was measured on, from that of each half.

        Args:
            resampled: the standard error of a half's value.
        """
        errors = [
            None if choice is None or choice.outputs is None else resampled(choice.outputs) for choice in self.choices
        ]
        known = [error for error in errors if error is not None]
        return math.hypot(*known) / 2 if len(known) == 2 else None

    def state_dict(self) -> dict[str, Any]:
        """The choices, and why there may be none, as plain values and tensors."""
        choices = [None if choice is None else _plain(choice) for choice in self.choices]
        return {"choices": choices, "refused": self.refused}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        self.refused = state["refused"]
        self.choices = [
            None if kept is None else Choice(**{**kept, "outputs": kept["outputs"] and Outputs(**kept["outputs"])})
            for kept in state["choices"]
        ]


def _plain(choice: Choice) -> dict[str, Any]:
    kept = None if choice.outputs is None else dict(vars(choice.outputs))
    return {"epoch": choice.epoch, "value": choice.value, "score": choice.score, "outputs": kept}


def _per_sample(step: Step, rows: range) -> Outputs | None:
    """The outputs of a batch, where they can be taken sample by sample."""
    for tree in (step.outputs, step.targets):
        found = [tensor for _, tensor in tensors(tree)] if _is_of_tensors(tree) else []
        if not found or any(tensor.shape[:1] != (len(rows),) for tensor in found):
            return None
    return Outputs(torch.tensor(rows), detached(step.outputs), step.targets)


def _is_of_tensors(tree: Any) -> bool:
    if isinstance(tree, (Mapping, tuple, list)):
        return all(map(_is_of_tensors, tree.values() if isinstance(tree, Mapping) else tree))
    return isinstance(tree, Tensor)


def _bytes(outputs: Outputs) -> int:
    return sum(tensor.nbytes for tree in (outputs.outputs, outputs.targets) for _, tensor in tensors(tree))


def _joined(parts: list[Outputs]) -> Outputs:
    rows = torch.cat([part.rows for part in parts])
    joined = [_cat([getattr(part, name) for part in parts]) for name in ("outputs", "targets")]
    return Outputs(rows, *joined)


def _cat(trees: list[Any]) -> Any:
    """One tree of those of several batches."""
    columns = zip(*([tensor for _, tensor in tensors(tree)] for tree in trees), strict=True)
    return refilled(trees[0], (torch.cat(column) for column in columns))
