"""Checks of a state that `torch.load` has read with `weights_only=True` from a file of someone else.

PyTorch then creates only plain values, tensors and containers, but it sets any attributes of a tensor, an `OrderedDict`
or a `Counter`. An attribute such as `items` replaces a method, so that a check sees other content than the code that
uses the state later.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.nn import Parameter


def find_replaced_method(state: Any) -> str | None:
    """Return the path of the first container or tensor whose attributes hide those of its class; None if there is none.

    Objects of other classes, such as those that the user has allowed with `torch.serialization.add_safe_globals`, are
    not checked.
    """
    for path, value in walk(state):
        attributes = _get_attributes(value)
        if type(attributes) is not dict:  # look-ups can find names that such a dictionary does not show
            return path
        kinds = _list_kinds(value)
        if kinds and any(
            not isinstance(name, str) or any(hasattr(kind, name) for kind in kinds) for name in attributes
        ):
            return path
    return None


def _list_kinds(value: Any) -> tuple[type, ...]:
    """Return the classes whose methods an attribute of a value must not replace."""
    if type(value) in (OrderedDict, Counter):
        return OrderedDict, Counter
    return (dict,) if isinstance(value, dict) else (Parameter,) if _is_tensor(value) else ()


def find_extra_state(state: Any) -> str | None:
    """Return the path of the first extra state of a module that may contain a pickle; None if there is none.

    The bytes of a tensor of any type can be a pickle, also those of a meta tensor, whose data is in shards.
    """
    for path, value in walk(state):
        if path.endswith("_extra_state") and not _is_harmless(value):
            return path
    return None


def walk(state: Any) -> Iterator[tuple[str, Any]]:
    """Yield each value of a state with its path, such as ``model.0.weight``; also the attributes of the values."""
    waiting: list[tuple[str, Any]] = [("", state)]
    seen = set[int]()  # ids of containers, which a state can contain several times, and which can contain themselves
    while waiting:
        path, value = waiting.pop()
        yield path, value
        attributes = _get_attributes(value)
        if isinstance(value, (dict, list, tuple, set)) or attributes:
            if id(value) in seen:
                continue
            seen.add(id(value))
            parts = [*_list_parts(value), *dict.items(attributes)]
            waiting += [(f"{path}.{key}" if path else str(key), part) for key, part in reversed(parts)]


def _list_parts(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys and values of a container, by the methods of its type, which an attribute cannot replace."""
    if isinstance(value, dict):
        return dict.items(value)
    return enumerate(value) if isinstance(value, (list, tuple, set)) else ()


def _get_attributes(value: Any) -> dict[str, Any]:
    return {} if isinstance(value, type) else getattr(value, "__dict__", {})


def _is_harmless(extra_state: Any) -> bool:
    is_empty = _is_tensor(extra_state) and Tensor.numel(extra_state) == 0
    return is_empty or extra_state is None or isinstance(extra_state, (bool, int, float))


def _is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor, not of a subclass, which may have attributes of its own with any names."""
    return type(value) in (Tensor, Parameter)
