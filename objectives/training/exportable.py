"""A trained model as it is served: a module that takes tensors one after the other, with an example of each."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.data.dataset import Dataset
from hpsearch.objectives.training.data.tree import Tree, leaves, tensors, unflatten_like
from hpsearch.objectives.training.evaluation.step import Call

_ROWS = 4  # in an example: an exporter takes a dimension of 1 for a constant
_LOOKED_AT = 64  # samples, to see which dimensions vary


@dataclass(frozen=True)
class Example:
    """Inputs to export a model with: a raw batch on the CPU, and for each of its tensors the variable dimensions."""

    x: Tree
    dynamic_dims: Sequence[frozenset[int]]


def build_example(val: Dataset) -> Example:
    """Return four validation inputs, and which of their dimensions vary between batches."""
    x = val.inputs(torch.arange(_ROWS) % len(val))
    found = [tensor for _, tensor in tensors(x)]
    free = [{0} for _ in found]
    if val.samples is not None:
        for start in range(0, min(len(val), _LOOKED_AT), _ROWS):
            other = [tensor for _, tensor in tensors(val.inputs((torch.arange(_ROWS) + start) % len(val)))]
            for known, one, another in zip(free, found, other, strict=False):
                known |= {dim for dim in range(min(one.ndim, another.ndim)) if one.shape[dim] != another.shape[dim]}
    return Example(x, [frozenset(known) for known in free])


class PositionalInputsWrapper(nn.Module):
    """A model that takes the tensors of its inputs one after the other, or by where they stand in the structure."""

    def __init__(self, model: nn.Module, call: Call, x: Tree) -> None:
        super().__init__()
        self.model = model

        def forward(*parts: Tensor, **named: Tensor) -> object:
            given = bound.bind(*parts, **named).args
            return call(model, unflatten_like(x, iter(given)))

        names = [re.sub(r"\W", "_", f"_{name}" if name[0].isdigit() else name) for name, _ in tensors(x)]
        bound = inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names])
        forward.__signature__ = bound  # type: ignore[attr-defined]  # an exporter asks for it
        self.forward = forward


def exportable(model: nn.Module, call: Call, x: Tree) -> tuple[nn.Module, list[tuple[str, Tensor]]]:
    """Return a module to export, and its inputs by name; the name of a single tensor is empty."""
    parts = list(tensors(x))
    if isinstance(x, Tensor):
        return model, parts
    if not parts or not all(isinstance(leaf, (Tensor, int, float, str, type(None))) for _, leaf in leaves(x)):
        raise ObjectiveError(f"its inputs are no tensors but {type(x).__name__}")
    return PositionalInputsWrapper(model, call, x), parts
