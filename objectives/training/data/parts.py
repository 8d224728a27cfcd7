"""The parts of a split: what of them is hashed, and what cannot be trained on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.data.dataset import Dataset
from hpsearch.objectives.training.data.samples import (
    Mapped,
    digest,
)
from hpsearch.objectives.training.data.tree import Tree, form, tensors


def add_part(found: Any, name: str, part: Dataset) -> None:
    """Add shapes, types and bytes of a part to a hash; of samples that are not in memory what stands for them."""
    if part.samples is not None:
        rows = None if part.rows is None else part.rows.tolist()
        found.update(f"{name}:{digest(part.fingerprint, rows)}:".encode())
    for tree in (part.x, part.y):
        for where, tensor in [("", tree)] if isinstance(tree, Mapped) else tensors(tree):
            _add_bytes(found, f"{name}:{where}:" if where else f"{name}:", tensor)


def _add_bytes(found: Any, what: str, tensor: Tensor | Mapped) -> None:
    dtype = str(tensor.dtype).removeprefix("torch.")
    found.update(f"{what}{dtype}:{tuple(tensor.shape)}:".encode())
    for part in tensor.batches() if isinstance(tensor, Mapped) else (tensor,):
        found.update(np.ascontiguousarray(part.detach().cpu().numpy()).data)


def check_part(name: str, part: Dataset, train: Dataset) -> None:
    """Refuse a part that is empty, of another form than the train split, or not finite.

    Raises:
        ObjectiveError: it is; one line names the split.
    """
    if not isinstance(part, Dataset):
        raise ObjectiveError(f"the {name} split must be a Dataset, not {type(part).__name__}")
    if len(part) == 0:
        raise ObjectiveError(f"the {name} split is empty")
    if part.samples is not None:
        return
    given, wanted = len(part), {len(tensor) for _, tensor in tensors(part.y)}
    if wanted != {given}:
        raise ObjectiveError(f"the {name} split has {given} inputs but {' and '.join(map(str, wanted))} targets")
    for what, tree, model in (("inputs", part.x, train.x), ("targets", part.y, train.y)):
        if _form(tree) != _form(model):
            raise ObjectiveError(
                f"the {name} {what} are {_form(tree)} a sample, but those of the train split are {_form(model)}"
            )
        if not isinstance(tree, Mapped):
            _check_finite(f"the {name} {what}", tree)


def _check_finite(what: str, tree: Tree) -> None:
    for where, tensor in tensors(tree):
        if tensor.dtype.is_floating_point and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).reshape(len(tensor), -1).any(dim=1).sum())
            name = f"{what} {where!r}" if where else what
            remedy = (
                "fill them in data(), with a column that marks them" if what.endswith("inputs") else "leave those out"
            )
            raise ObjectiveError(f"{name} hold NaN or infinity in {bad} of {len(tensor)} samples: {remedy}")


def _form(tree: Tree) -> str:
    return form(tree[:1] if isinstance(tree, Mapped) else tree)
