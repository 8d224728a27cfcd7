"""What looks wrong about a run that has ended, told in sentences."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hpsearch.objectives.training.data.dataset import Dataset
from hpsearch.objectives.training.data.tree import tensors

if TYPE_CHECKING:
    from hpsearch.objectives.training.loop.run import Run
    from hpsearch.objectives.training.result import FitResult

_CLOSE = 0.01  # a validation loss within this share of the training loss is closer than chance leaves it
_VANISHED = 1e-7  # norm of a layer's gradient
_ENOUGH = 8  # evenly spaced steps tell of the whole run; with fewer of them all that were noted are looked at
_EXPLODED = 100  # times what it was in the first quarter of the run: a loss that sums has large gradients all along


def leakage(run: Run, result: FitResult) -> list[str]:
    """Signs that validation samples were trained on: the same inputs in both, or a loss that tracks the training's."""
    found = []
    shared = shared_inputs(run.splits.train, run.splits.val)
    if shared:
        found.append(
            f"- {shared} of {len(run.splits.val)} validation inputs are also training inputs, to the last bit: "
            "split by group, or drop the copies"
        )
    if tracks(
        [record.metrics["train_loss"] for record in result.history],
        [record.metrics["val_loss"] for record in result.history],
    ):
        found.append(
            f"- the validation loss stayed within {_CLOSE:.0%} of the training loss from epoch to epoch: "
            "look for copies of the same case in both splits, or features that know the answer"
        )
    return found


def tracks(train: Sequence[float], val: Sequence[float]) -> bool:
    """Whether two curves of losses, while they fall, are closer than those of different samples would be."""
    if len(train) < 3 or not train[-1] < 0.9 * train[0]:
        return False
    return all(abs(b - a) <= _CLOSE * abs(a) for a, b in zip(train[1:], val[1:], strict=True))


def shared_inputs(train: Dataset, other: Dataset) -> int:
    """How many inputs of `other` are in `train` too; of data that are made when they are needed none are looked at."""
    if not train.in_memory:
        return 0
    seen = set(_digests(train))
    return sum(digest in seen for digest in _digests(other))


def _digests(data: Dataset) -> list[bytes]:
    parts = [
        tensor.detach().cpu().contiguous().reshape(len(data), -1).view(torch.uint8).numpy()
        for _, tensor in tensors(data.x)
    ]
    rows = (b"".join(row.tobytes() for row in sample) for sample in zip(*parts, strict=True))
    return [hashlib.blake2b(row, digest_size=16).digest() for row in rows]


def instabilities(run: Run, result: FitResult, steps: Sequence[dict[str, Any]]) -> list[str]:
    """Skipped and clipped steps, jumps of the loss, and layers whose gradients vanished or exploded."""
    found = []
    if run.guard.skipped_in_all:
        found.append(f"- {run.guard.skipped_in_all} of {run.step} steps overflowed in fp16: skipped, loss scale halved")
    steps, limit = _even(steps, run.config.log_every or 1), run.config.clip_grad_norm
    norms = [record["grad_norm"] for record in steps if record.get("grad_norm") is not None]
    over = sum(norm > limit for norm in norms) if limit else 0
    if over and limit:
        found.append(f"- {over} of {len(norms)} noted steps had a gradient norm above {limit:g}: clipped to it")
    found += _jumps(result)
    for layer, norms in _by_layer(steps).items():
        name, quarter, whole = layer or "the model", max(len(norms) // 4, 1), statistics.median(norms)
        first, last = statistics.median(norms[:quarter]), statistics.median(norms[-quarter:])
        if whole < _VANISHED:
            found.append(f"- the gradient of `{name}` vanished: its median norm is {whole:.2g}")
        elif last > _EXPLODED * first or math.isinf(last):
            found.append(f"- the gradient of `{name}` exploded: its median norm went from {first:.2g} to {last:.2g}")
    return found


def _even(steps: Sequence[dict[str, Any]], every: int) -> Sequence[dict[str, Any]]:
    """Steps evenly spaced over the run: the first are noted each, and would outweigh all others."""
    even = [record for record in steps if record["step"] % every == 0]
    return even if len(even) >= _ENOUGH else steps


def _jumps(result: FitResult) -> list[str]:
    losses = [record.metrics["train_loss"] for record in result.history]
    return [
        f"- the training loss rose from {losses[epoch - 1]:.4g} to {losses[epoch]:.4g} in epoch {epoch + 1}: "
        "nothing was done; lower the rate or warm up longer"
        for epoch in range(1, len(losses))
        if losses[epoch] > 1.5 * losses[epoch - 1] + 1e-3
    ]


def _by_layer(steps: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    norms: dict[str, list[float]] = {}
    for record in steps:
        for layer, norm in record.get("layers", {}).items():
            norms.setdefault(layer, []).append(math.inf if norm is None else norm)
    return norms
