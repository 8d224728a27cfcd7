"""Batches of any structure: a tensor, or dictionaries, tuples and lists of them, nested."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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


def leaves(tree: Tree, name: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over what is in the structure with its place: ``ids``, ``pair.0``, or nothing for a single tensor."""
    if not isinstance(tree, (Mapping, tuple, list)):
        yield name, tree
        return
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        yield from leaves(value, f"{name}.{key}" if name else str(key))


def tensors(tree: Tree) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the tensors with their places, in the order of the tree."""
    return ((name, leaf) for name, leaf in leaves(tree) if isinstance(leaf, Tensor))


def moved(tree: Tree, device: torch.device | str) -> Tree:
    """The tree on a device; objects of other libraries move by their own `to`."""
    if isinstance(tree, (Tensor, Mapping, tuple, list)):
        return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), tree)
    return tree.to(device) if hasattr(tree, "to") else tree


def on_cpu(tree: Tree) -> Tree:
    """The tree on the CPU once it is copied: what `moved` copies from a GPU may be read too early."""
    return moved(map_tensors(Tensor.cpu, tree), "cpu")


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


def concatenated(trees: Sequence[Tree]) -> Tree:
    """The samples of trees of one structure, one after the other, as one tree."""
    columns = zip(*([tensor for _, tensor in tensors(tree)] for tree in trees), strict=True)
    return refilled(trees[0], (torch.cat(column) for column in columns))
