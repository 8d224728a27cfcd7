"""What users have, as tensors: arrays, lists, and dictionaries and tuples of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.data.samples import Mapped
from hpsearch.objectives.training.data.tree import Tree, map_tensors


def is_arrays(x: Any) -> bool:
    """Whether these are columns of numbers, and not a dataset that gives samples."""
    return isinstance(x, (Tensor, np.ndarray, Mapping, list, tuple)) or hasattr(x, "__array__")


def known_targets(y: Any) -> Any:
    """Targets that are one value a sample; None where they are more, and nothing is known beforehand."""
    try:
        return None if y is None else plain(y)
    except (TypeError, ValueError, ObjectiveError):
        return None


def as_inputs(x: Any) -> Tree:
    """Inputs as tensors: floating point is float32, uint8 stays, other integers are int64; a mapped file stays one."""
    if isinstance(x, np.memmap):
        return Mapped(x)
    return map_tensors(lambda tensor: tensor if tensor.dtype == torch.uint8 else to_plain(tensor), as_tree(x, "x"))


def as_tree(values: Any, name: str) -> Tree:
    """Arrays as tensors; a list is one array, a tuple or a dictionary is several.

    Raises:
        ObjectiveError: the values called `name` are ragged, or no numbers.
    """
    if isinstance(values, Mapping):
        return {str(key): as_tree(value, f"{name}[{key!r}]") for key, value in values.items()}
    if isinstance(values, tuple) and not all(np.isscalar(value) for value in values):
        return tuple(as_tree(value, f"{name}[{number}]") for number, value in enumerate(values))
    if isinstance(values, Tensor):
        return values
    try:
        return torch.as_tensor(np.asarray(values))
    except (ValueError, TypeError) as error:
        shapes = [np.shape(value) for value in values]
        odd = next((k for k, shape in enumerate(shapes) if shape != shapes[0]), None)
        if odd is None:
            raise ObjectiveError(f"{name} holds what is no number: {error}") from error
        raise ObjectiveError(
            f"{name} is ragged: sample 0 has shape {list(shapes[0])} and sample {odd} {list(shapes[odd])}; "
            "give collate=, which makes a batch of a list of samples, such as `padded`"
        ) from error


def plain(values: Any) -> Tensor:
    """Targets as a tensor: integers are int64, floating point is float32."""
    return to_plain(values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values)))


def to_plain(tensor: Tensor) -> Tensor:
    """Integers as int64, floating point as float32."""
    return tensor.to(torch.float32 if tensor.dtype.is_floating_point else torch.int64)
