"""How a model takes its inputs: as one argument, or the parts of a structure as arguments of their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.data.tree import Tree

Call = Callable[[nn.Module, Tree], Any]


def whole(model: nn.Module, x: Tree) -> Any:
    """``model(x)``."""
    return model(x)


def by_name(model: nn.Module, x: Tree) -> Any:
    """``model(**x)``."""
    return model(**x)


def in_order(model: nn.Module, x: Tree) -> Any:
    """``model(*x)``."""
    return model(*x)


def call_of(model: nn.Module, x: Tree) -> Call:
    """How `model` is called with a batch of inputs: by name where these are its arguments, else with all as one.

    Raises:
        ObjectiveError: it takes neither.
    """
    if not isinstance(x, (Mapping, tuple)):
        return whole
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # written in C
        return whole
    if isinstance(x, Mapping) and _fits(signature, **x):
        return by_name
    several = [p for p in signature.parameters.values() if p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD]
    if isinstance(x, tuple) and len(several) > 1 and _fits(signature, *x):
        return in_order
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
