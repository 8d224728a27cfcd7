"""Detect changes of a model by code that must only read it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpsearch.objectives.errors import ObjectiveError


class ModelState(NamedTuple):
    """Properties of a model that an evaluation must not change.

    Attributes:
        kinds: dtype, shape and `requires_grad` of each parameter and persistent buffer, by name.
        training: modules in training mode, by name.
        sums: sum and sum of squares of each parameter and persistent buffer [n, 2], in float64, on the device.
    """

    kinds: dict[str, tuple[torch.dtype, torch.Size, bool]]
    training: frozenset[str]
    sums: Tensor


@contextmanager
def reject_changes(model: nn.Module, owner: str) -> Iterator[None]:
    """Check that the block, which calls the objective's method `owner`, does not change the model.

    Raises:
        ObjectiveError: the model is changed.
    """
    before = read_model_state(model)
    yield
    after = read_model_state(model)
    if before is not None and after is not None and (change := describe_change(before, after)):
        raise ObjectiveError(f"{owner} changes the model: {change}; use a copy.deepcopy(model)")


def read_model_state(model: nn.Module) -> ModelState | None:
    """Return the state of a model; None if it is sharded, so that its tensors are exchanged while it runs."""
    found = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    if any(isinstance(tensor, DTensor) for tensor in found.values()):
        return None
    kinds = {name: (tensor.dtype, tensor.shape, tensor.requires_grad) for name, tensor in found.items()}
    training = frozenset(name for name, module in model.named_modules() if module.training)
    sums = [torch.stack(_sum(tensor.detach())) for tensor in found.values()]
    return ModelState(kinds, training, torch.stack(sums) if sums else torch.empty(0, 2))


def _sum(tensor: Tensor) -> tuple[Tensor, Tensor]:
    values = tensor.abs() if tensor.is_complex() else tensor
    total = values.sum(dtype=torch.float64)
    squares = torch.linalg.vector_norm(values.float(), dtype=torch.float64)
    return total, squares


def describe_change(before: ModelState, after: ModelState) -> str | None:
    """Return the first difference between two states of a model; None if they are equal."""
    for name in before.kinds | after.kinds:
        if name not in before.kinds or name not in after.kinds:
            return f"{name} was {'added' if name in after.kinds else 'removed'}"
        for what, one, other in zip(
            ("dtype", "shape", "requires_grad"), before.kinds[name], after.kinds[name], strict=True
        ):
            if one != other:
                return f"{what} of {name} was {_format(one)} and is {_format(other)}"
    if before.training != after.training:
        name = min(before.training ^ after.training)
        return f"{name or 'the model'} was switched to {'training' if name in after.training else 'evaluation'} mode"
    same = torch.isclose(before.sums, after.sums, rtol=0, atol=0, equal_nan=True).all(dim=1)
    if bool(same.all()):
        return None
    return f"the values of {list(before.kinds)[int(same.logical_not().nonzero()[0])]} changed"


def _format(value: object) -> str:
    return str(list(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")
