"""Trees of tensors: a tensor, or nested dictionaries, tuples and lists of tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

# A tensor; a dict, tuple or list of trees; or another object, which is kept and moved by its method `to` if it has one.
Tree = Any


def map_tensors(function: Callable[[Tensor], Any], tree: Tree, *, keeps_types: bool = False) -> Tree:
    """Return the tree with `function` applied to each tensor.

    Args:
        function: the function.
        tree: the tree.
        keeps_types: whether subclasses of `dict`, such as model outputs with attributes, keep their type; otherwise all
            mappings become dictionaries.
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        mapped = {key: map_tensors(function, value, keeps_types=keeps_types) for key, value in tree.items()}
        return _replace_values(tree, mapped, function) if keeps_types and type(tree) is not dict else mapped
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, value, keeps_types=keeps_types) for value in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(function, value, keeps_types=keeps_types) for value in tree)
    return tree


def _replace_values(
    tree: Mapping[Any, Tree], values: dict[Any, Tree], function: Callable[[Tensor], Any]
) -> dict[Any, Tree]:
    """Return a copy of a mapping with other values and attributes; the values if the mapping cannot be copied."""
    if not isinstance(tree, dict):
        return values
    try:
        copied = copy.copy(tree)
        for name, attribute in vars(copied).items():
            vars(copied)[name] = map_tensors(function, attribute)
        for key, value in values.items():
            copied[key] = value
    except Exception:  # of the class of the mapping
        return values
    return copied


def leaves(tree: Tree, name: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over the leaves with their paths: ``ids``, ``pair.0``, or an empty path for a single tensor."""
    if not isinstance(tree, (Mapping, tuple, list)):
        yield name, tree
        return
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        yield from leaves(value, f"{name}.{key}" if name else str(key))


def to_python_scalars(tree: Any) -> Any:
    """Convert NumPy's scalars, which a checkpoint cannot hold, such as the result of `np.mean`."""
    if isinstance(tree, np.generic):
        return tree.item()
    if not any(isinstance(leaf, np.generic) for _, leaf in leaves(tree)):
        return tree
    if isinstance(tree, Mapping):
        return {key: to_python_scalars(value) for key, value in tree.items()}
    values = map(to_python_scalars, tree)
    return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)


def tensors(tree: Tree) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the tensors with their paths, in the order of the tree."""
    return ((name, leaf) for name, leaf in leaves(tree) if isinstance(leaf, Tensor))


def watch_changes(*trees: Tree) -> Callable[[], bool]:
    """Return a function that returns whether a tensor of the trees has been changed in place since this call."""
    watched = [x for tree in trees for _, x in tensors(tree) if not x.is_inference()]  # PyTorch counts their changes
    versions = [x._version for x in watched]
    return lambda: versions != [x._version for x in watched]


def to_device(tree: Tree, device: torch.device | str) -> Tree:
    """Return the tree on a device; objects of other libraries are moved by their method `to`."""
    if isinstance(tree, (Tensor, Mapping, tuple, list)):
        return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), tree)
    return tree.to(device) if hasattr(tree, "to") else tree


def to_cpu(tree: Tree) -> Tree:
    """Return the tree on the CPU and wait until the copies are complete; the copies of `to_device` are asynchronous."""
    return to_device(map_tensors(Tensor.cpu, tree), "cpu")


def index_rows(tree: Tree, rows: Tensor | slice) -> Tree:
    """Return the tree with only the rows at `rows` of each tensor."""
    return map_tensors(lambda tensor: tensor[rows], tree)


def describe_shapes(tree: Tree) -> str:
    """Describe the shapes of one sample: ``[3, 8, 8] float32``, ``{ids: [7] int64, mask: [7] bool}``."""
    if isinstance(tree, Tensor):
        return f"{list(tree.shape[1:])} {str(tree.dtype).removeprefix('torch.')}"
    if isinstance(tree, Mapping):
        return f"{{{', '.join(f'{key}: {describe_shapes(value)}' for key, value in tree.items())}}}"
    if isinstance(tree, (tuple, list)):
        return f"({', '.join(map(describe_shapes, tree))})"
    return type(tree).__name__


def unflatten_like(tree: Tree, parts: Iterator[Tensor]) -> Tree:
    """Return the tree with its tensors replaced by the tensors in `parts`, in order."""
    return map_tensors(lambda _: next(parts), tree)


def concatenate(trees: Sequence[Tree]) -> Tree:
    """Concatenate trees of the same structure along the first dimension."""
    columns = zip(*([tensor for _, tensor in tensors(tree)] for tree in trees), strict=True)
    return unflatten_like(trees[0], (torch.cat(column) for column in columns))
