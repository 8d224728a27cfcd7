"""The step of an objective: loss, outputs and metrics of one batch."""

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
from hpsearch.objectives.training.evaluation.losses import compute_loss_weight, compute_mean_loss

ForwardCall = Callable[[nn.Module, Tree], Any]


def call_single(model: nn.Module, x: Tree) -> Any:
    """Return ``model(x)``."""
    return model(x)


def bind_forward(model: nn.Module, x: Tree) -> ForwardCall:
    """Return a function that calls `model` with a batch, by keyword for a mapping and by position for a tuple.

    Raises:
        ObjectiveError: the model's `forward` cannot be called with the batch.
    """
    if not isinstance(x, (Mapping, tuple)):
        return call_single
    try:
        # `torch.compile` hides the signature.
        signature = inspect.signature(getattr(model, "_orig_mod", model).forward)
    except (TypeError, ValueError):  # implemented in C
        return call_single
    if isinstance(x, Mapping) and _can_bind(signature, **x):
        return lambda model, x: model(**x)
    several = [p for p in signature.parameters.values() if p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD]
    if isinstance(x, tuple) and len(several) > 1 and _can_bind(signature, *x):
        return lambda model, x: model(*x)
    if _can_bind(signature, x):
        return call_single
    given = ", ".join(x) if isinstance(x, Mapping) else f"{len(x)} parts"
    raise ObjectiveError(
        f"{type(model).__name__}.forward takes ({', '.join(signature.parameters)}), but a batch of inputs has {given}; "
        "use the same names"
    )


def _can_bind(signature: inspect.Signature, *arguments: Any, **named: Any) -> bool:
    try:
        signature.bind(*arguments, **named)
    except TypeError:
        return False
    return True


@dataclass(slots=True)
class Step:
    """Result of an objective's `step` for one batch.

    Attributes:
        loss: the loss to minimize: a scalar mean over the batch, or one value per sample [n].
        outputs: outputs for `Objective.metrics`; None to skip the metrics.
        targets: targets for `Objective.metrics`; by default the targets of the batch.
        metrics: scalar means over the batch, such as parts of the loss. They are averaged and reported by name.
        weight: divisor of the means, for example the number of unmasked tokens; None for the number of samples.
    """

    loss: Tensor
    outputs: Any = None
    targets: Any = None
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict)
    weight: Tensor | float | None = None


# Computes the step of a batch on the model's device; the loss is a scalar.
StepFunction = Callable[[nn.Module, Batch, AbstractContextManager[None]], Step]


class LossStep:
    """Step function for ``loss(model(x), y)``, with the loss in fp32."""

    def __init__(self, loss: nn.Module, call: ForwardCall = call_single) -> None:
        self.loss, self.call = loss, call
        self._has_weights = hasattr(loss, "weigh")

    def __call__(self, model: nn.Module, batch: Batch, autocast: AbstractContextManager[None] | None = None) -> Step:
        """Return the `Step` of a batch."""
        with autocast or nullcontext():
            output = self.call(model, batch.x)
        loss = compute_mean_loss(self.loss, output, batch.y, batch.size)
        return Step(loss, output, batch.y, {}, compute_loss_weight(self.loss, batch.y) if self._has_weights else None)


def detach_outputs(tree: Any) -> Any:
    """Return outputs detached from the autograd graph, with floating-point numbers in fp32."""

    def detach(tensor: Tensor) -> Tensor:
        return tensor.detach().float() if tensor.is_floating_point() else tensor.detach()

    return map_tensors(detach, tree, keeps_types=True)
