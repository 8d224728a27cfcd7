"""The evaluation step of an objective."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.data.dataset import Batch
from hpsearch.objectives.training.data.tree import Tree, map_tensors
from hpsearch.objectives.training.evaluation.losses import mean, weigh

Call = Callable[[nn.Module, Tree], Any]


def whole(model: nn.Module, x: Tree) -> Any:
    """``model(x)``."""
    return model(x)


def call_of(model: nn.Module, x: Tree) -> Call:
    """Return how to call `model` with a batch: a mapping by name, a tuple in order, or else as one argument.

    Raises:
        ObjectiveError: the model takes the batch in no way.
    """
    if not isinstance(x, (Mapping, tuple)):
        return whole
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # written in C
        return whole
    if isinstance(x, Mapping) and _fits(signature, **x):
        return lambda model, x: model(**x)
    several = [p for p in signature.parameters.values() if p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD]
    if isinstance(x, tuple) and len(several) > 1 and _fits(signature, *x):
        return lambda model, x: model(*x)
    if _fits(signature, x):
        return whole
    given = ", ".join(x) if isinstance(x, Mapping) else f"{len(x)} parts"
    raise ObjectiveError(
        f"{type(model).__name__}.forward takes ({', '.join(signature.parameters)}), but a batch of inputs has {given}: "
        "give the one the names of the other"
    )


def _fits(signature: inspect.Signature, *arguments: Any, **named: Any) -> bool:
    try:
        signature.bind(*arguments, **named)
    except TypeError:
        return False
    return True


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


# The step of a batch that is on the model's device; its loss is a scalar.
Stepping = Callable[[nn.Module, Batch, AbstractContextManager[None]], Step]


class LossStep:
    """``loss(model(x), y)``, with the loss in fp32."""

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
    """Return outputs without their graph, in fp32."""
    return map_tensors(lambda tensor: tensor.detach().float(), tree)
