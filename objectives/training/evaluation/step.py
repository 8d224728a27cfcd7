"""A step over a batch, as training takes it and evaluation repeats it: outputs, loss, and what else is measured."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from hpsearch.objectives.training.data.dataset import Batch
from hpsearch.objectives.training.data.tree import map_tensors
from hpsearch.objectives.training.evaluation.calling import Call, whole
from hpsearch.objectives.training.evaluation.losses import mean, weigh


@dataclass(slots=True)
class Step:
    """What a batch came to.

    Attributes:
        loss: to be lowered: the mean over the batch, a scalar, or one value a sample [n].
        outputs: what `Objective.metrics` are updated with; None where they are not.
        targets: likewise; the batch's unless given.
        metrics: scalars that are means over the batch, such as parts of the loss: averaged, and reported by name.
        weight: what the means are over, where that is not the samples of the batch: the tokens that count, say.
    """

    loss: Tensor
    outputs: Any = None
    targets: Any = None
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict)
    weight: Tensor | float | None = None


class Stepping(Protocol):
    """The step of a run."""

    def __call__(self, model: nn.Module, batch: Batch, autocast: AbstractContextManager[None]) -> Step:
        """The step of a batch that is on the model's device; its loss is a scalar."""
        ...


class LossStep:
    """``loss(model(x), y)``, the loss in fp32."""

    def __init__(self, loss: nn.Module, call: Call = whole) -> None:
        self.loss, self.call = loss, call
        self._uneven = hasattr(loss, "weigh")

    def __call__(self, model: nn.Module, batch: Batch, autocast: AbstractContextManager[None] | None = None) -> Step:
        """The step of a batch."""
        with autocast or nullcontext():
            output = self.call(model, batch.x)
        loss = mean(self.loss, output, batch.y, batch.size)
        return Step(loss, output, batch.y, {}, weigh(self.loss, batch.y) if self._uneven else None)


def detached(tree: Any) -> Any:
    """Outputs without their graph, in fp32."""
    if isinstance(tree, Tensor):
        return tree.detach().float()
    return map_tensors(lambda tensor: tensor.detach().float(), tree)
