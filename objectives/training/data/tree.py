"""Batches of any structure: a tensor, or dictionaries, tuples and lists of them, nested."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

# A tensor; a dict, tuple or list of trees; anything else is passed on as it is, and moved where it has a method `to`.
Tree = Any


def map_tensors(function: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """The tree with each of its tensors replaced."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, value) for value in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(function, value) for value in tree)
    return tree


def tensors(tree: Tree, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Each tensor with where it stands, in the order of the tree: ``ids``, ``pair.0``, or nothing for a lone one."""
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, (Mapping, tuple, list)):
        inner = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for key, value in inner:
            yield from tensors(value, f"{name}.{key}" if name else str(key))


def moved(tree: Tree, device: torch.device | str) -> Tree:
    """The tree on a device; objects of other libraries move by their own `to`."""
    if isinstance(tree, (Tensor, Mapping, tuple, list)):
        return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), tree)
    return tree.to(device) if hasattr(tree, "to") else tree


def taken(tree: Tree, rows: Tensor | slice) -> Tree:
    """The tree of the rows of each tensor."""
    return map_tensors(lambda tensor: tensor[rows], tree)


def form(tree: Tree) -> str:
    """What a sample of a batch is, in words: ``[3, 8, 8] float32``, ``{ids: [7] int64, mask: [7] bool}``."""
    if isinstance(tree, Tensor):
        return f"{list(tree.shape[1:])} {str(tree.dtype).removeprefix('torch.')}"
    if isinstance(tree, Mapping):
        return f"{{{', '.join(f'{key}: {form(value)}' for key, value in tree.items())}}}"
    if isinstance(tree, (tuple, list)):
        return f"({', '.join(map(form, tree))})"
    return type(tree).__name__


def refilled(tree: Tree, parts: Iterator[Tensor]) -> Tree:
    """The tree with its tensors replaced by these, in its order."""
    return map_tensors(lambda _: next(parts), tree)
