"""A trained model for serving: a module with positional tensor inputs, and example inputs."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.data.dataset import Dataset
from hpsearch.objectives.training.data.tree import Tree, leaves, tensors, unflatten_like
from hpsearch.objectives.training.evaluation.step import ForwardCall

_ROWS = 4  # rows of an example; an exporter treats a dimension of 1 as a constant
_SAMPLES = 64  # samples in which `build_example` searches for varying dimensions


@dataclass(frozen=True)
class Example:
    """Example inputs for the export of a model.

    Attributes:
        x: raw batch on the CPU.
        dynamic_dims: for each tensor of `x`, the dimensions with dynamic size.
    """

    x: Tree
    dynamic_dims: Sequence[frozenset[int]]


def build_example(val: Dataset) -> Example:
    """Return the example for an export: four validation inputs, and the dimensions that vary between batches."""
    x = val.inputs(torch.arange(_ROWS) % len(val))
    example = [tensor for _, tensor in tensors(x)]
    dynamic_dims = [{0} for _ in example]
    if val.samples is not None:
        for start in range(0, min(len(val), _SAMPLES), _ROWS):
            other = [tensor for _, tensor in tensors(val.inputs((torch.arange(_ROWS) + start) % len(val)))]
            for dims, one, another in zip(dynamic_dims, example, other, strict=False):
                dims |= {dim for dim in range(min(one.ndim, another.ndim)) if one.shape[dim] != another.shape[dim]}
    return Example(x, [frozenset(dims) for dims in dynamic_dims])


class PositionalInputsWrapper(nn.Module):
    """Wrapper of a model whose input tensors are positional arguments, or keywords named by their path in the batch."""

    def __init__(self, model: nn.Module, call: ForwardCall, x: Tree) -> None:
        super().__init__()
        self.model = model

        def forward(*parts: Tensor, **named: Tensor) -> object:
            return call(model, unflatten_like(x, iter(bound.bind(*parts, **named).args)))

        names = [_make_identifier(name) for name, _ in tensors(x)]
        bound = inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names])
        forward.__signature__ = bound  # type: ignore[attr-defined]  # exporters read it
        self.forward = forward


def _make_identifier(name: str) -> str:
    identifier = re.sub(r"\W", "_", f"_{name}" if name[0].isdigit() else name)
    return f"{identifier}_" if keyword.iskeyword(identifier) else identifier


def make_exportable(model: nn.Module, call: ForwardCall, x: Tree) -> tuple[nn.Module, list[tuple[str, Tensor]]]:
    """Return a module to export, and its inputs by name; the name of a single tensor is empty.

    Raises:
        ObjectiveError: the inputs are not tensors.
    """
    parts = list(tensors(x))
    if isinstance(x, Tensor):
        return model, parts
    if not parts or not all(isinstance(leaf, (Tensor, int, float, str, type(None))) for _, leaf in leaves(x)):
        raise ObjectiveError(f"the model's inputs must be tensors, not {type(x).__name__}")
    return PositionalInputsWrapper(model, call, x), parts
