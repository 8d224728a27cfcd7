"""State of metrics as plain values, for mid-epoch checkpoints.

Metrics of torchmetrics declare the names of their state. The state of other metrics is in their attributes.
"""

from __future__ import annotations

import enum
import re
import types
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpsearch.objectives.errors import ObjectiveError

_PLAIN = (type(None), bool, int, float, str, bytes, Tensor)
_CONSTANT = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, enum.Enum)
_CONSTANTS = (*_CONSTANT, re.Pattern, Path, torch.dtype, torch.device)
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


class UnserializableStateError(Exception):
    """Error for a metric state that a checkpoint cannot hold."""


def get_metric_state(metrics: object) -> dict[str, Any]:
    """Return the attribute values of an object and its nested objects, by name.

    Raises:
        UnserializableStateError: the type of a value cannot be stored in a checkpoint.
    """
    return _dump_object(metrics, type(metrics).__name__, [])


def load_metric_state(metrics: object, state: Mapping[str, Any]) -> None:
    """Restore the result of `get_metric_state` in an object that was constructed in the same way.

    The state may come from another person. Its names must not lead from the object to classes, functions or modules,
    because their attributes belong to the whole process: `sys.path`, for example, decides which code is imported.

    Raises:
        ObjectiveError: the state names an attribute that no state of the object contains.
    """
    known = dict(_iterate_state(metrics))
    for name, value in state.items():
        attribute = name.removeprefix("buffer ").removeprefix("module ")
        is_object = isinstance(value, Mapping) and value.get("kind") == "object"
        is_special = attribute.startswith("__") and name not in known
        if is_special or (is_object and not _is_stored_by_attributes(known.get(name))):
            raise ObjectiveError(
                f"the checkpoint does not fit the metrics of the objective: {type(metrics).__name__} has no state "
                f"{name!r}"
            )
        if is_object:
            load_metric_state(known[name], value["of"])
        else:
            _assign(metrics, attribute, _load(value))


def _is_stored_by_attributes(value: object) -> bool:
    """Return whether checkpoints store a value as a mapping of its attributes."""
    return hasattr(value, "__dict__") and not isinstance(value, (*_PLAIN, *_CONSTANTS))


def _dump_object(thing: object, path: str, above: list[int]) -> dict[str, Any]:
    found = {}
    for name, value in _iterate_state(thing):
        if isinstance(value, _CONSTANTS) or id(value) in above:
            continue
        found[name] = _dump(value, f"{path}.{name}", [*above, id(thing)])
    return found


def _iterate_state(thing: object) -> Iterator[tuple[str, Any]]:
    """Iterate over names and values of an object's state."""
    if isinstance(thing, nn.Module):
        yield from ((f"buffer {name}", value) for name, value in thing._buffers.items())
        yield from ((f"module {name}", value) for name, value in thing._modules.items())
    declared = getattr(thing, "_defaults", None) if hasattr(thing, "full_state_update") else None  # torchmetrics'
    for name, value in vars(thing).items():
        if isinstance(thing, nn.Module) and name in _MODULE_ATTRIBUTES:
            continue
        if declared is not None and name.startswith("_") and name not in declared and name != "_update_count":
            continue
        yield name, value


def _dump(value: Any, path: str, above: list[int]) -> Any:
    if isinstance(value, _PLAIN):
        return value.detach() if isinstance(value, Tensor) else value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype != object:
        return {"kind": "array", "of": torch.from_numpy(value.copy())}
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return {"kind": type(value).__name__, "of": [_dump_item(item, path) for item in value]}
    if isinstance(value, dict):
        return {"kind": "dict", "of": [(_dump_item(key, path), _dump_item(item, path)) for key, item in value.items()]}
    if hasattr(value, "__dict__"):
        return {"kind": "object", "of": _dump_object(value, path, above)}
    raise UnserializableStateError(f"{path} is a {type(value).__name__}")


def _dump_item(value: Any, path: str) -> Any:
    kept = _dump(value, path, [])
    if isinstance(kept, dict) and kept["kind"] == "object":
        raise UnserializableStateError(f"{path} contains a {type(value).__name__}")
    return kept


_KINDS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}


def _load(kept: Any) -> Any:
    if not isinstance(kept, Mapping):
        return kept
    kind, held = kept["kind"], kept["of"]
    if kind == "array":
        return held.numpy()
    if kind == "dict":
        return {_load(key): _load(value) for key, value in held}
    return _KINDS[kind](_load(value) for value in held)


def _assign(owner: Any, name: str, value: Any) -> None:
    current = getattr(owner, name, None)
    if isinstance(current, Tensor) and isinstance(value, Tensor):
        value = value.to(current.device)
    if isinstance(current, (dict, set)) and type(value) is not type(current) and isinstance(value, (dict, set)):
        current.clear()  # keeps a subclass such as Counter
        current.update(value)
    else:
        setattr(owner, name, value)
