"""Findings about a run for its report: signs of data leakage and of unstable training."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.data.leakage import find_leaks_once
from hpsearch.objectives.training.data.splits import Splits

if TYPE_CHECKING:
    from hpsearch.objectives.training.loop.run import Run
    from hpsearch.objectives.training.result import FitResult


_LOSS_TOLERANCE = 0.01  # relative tolerance; the losses of different samples differ by more


_VANISHED_NORM = 1e-7  # norm of a layer's gradient below which the gradient has vanished


_MIN_STEPS = 8  # evenly spaced records that represent a run


_EXPLODED_FACTOR = 100  # relative to the first quarter of the run, because a summed loss always has large gradients


def describe_leakage(run: Run, result: FitResult) -> list[str]:
    """List signs of leakage: those of `find_leaks`, or a validation loss that equals the training loss."""
    if run.plan.refit is not None:
        return ["A refit trains on the validation samples too, so their metrics do not estimate the test metrics."]
    found = [f"- {leak}" for leak in _list_leaks(run.splits, result.split_hash)]
    if is_same_curve(
        [record.metrics["train_loss"] for record in result.history],
        [record.metrics["val_loss"] for record in result.history],
    ):
        found.append(
            f"- the validation loss stayed within {_LOSS_TOLERANCE:.0%} of the training loss from epoch to epoch: "
            "look for duplicates in both splits, or features that contain the target"
        )
    return found or ["None found."]


def _list_leaks(splits: Splits, split_hash: str) -> list[str]:
    try:
        return list(find_leaks_once(splits, split_hash).values())
    except ObjectiveError as error:  # the training is over; its report is worth more than the error
        return [str(error)]


def is_same_curve(train: Sequence[float], val: Sequence[float]) -> bool:
    """Return whether two falling loss curves are closer than the curves of different samples would be."""
    if len(train) < 3 or not train[-1] < 0.9 * train[0]:
        return False
    return all(abs(b - a) <= _LOSS_TOLERANCE * abs(a) for a, b in zip(train[1:], val[1:], strict=True))


def list_instabilities(run: Run, result: FitResult, steps: Sequence[dict[str, Any]]) -> list[str]:
    """List skipped and clipped steps, jumps of the loss, and layers with vanished or exploded gradients."""
    found = []
    if skipped := run.finite_guard.skipped_in_all:
        found.append(f"- {skipped} of {run.step} steps overflowed in fp16 and were skipped")
    # Each of the first steps has a record. Evenly spaced records represent the run, if there are enough of them.
    even = [record for record in steps if record["step"] % (run.config.log_every or 1) == 0]
    steps, limit = even if len(even) >= _MIN_STEPS else steps, run.config.clip_grad_norm
    norms = [record["grad_norm"] for record in steps if record.get("grad_norm") is not None]
    over = sum(norm > limit for norm in norms) if limit else 0
    if over and limit:
        found.append(f"- {over} of {len(norms)} recorded steps had a gradient norm above {limit:g} and were clipped")
    losses = [record.metrics["train_loss"] for record in result.history]
    found += [
        f"- the training loss rose from {losses[epoch - 1]:.4g} to {losses[epoch]:.4g} in epoch {epoch + 1}: "
        "lower the learning rate or lengthen the warm-up"
        for epoch in range(1, len(losses))
        if losses[epoch] > 1.5 * losses[epoch - 1] + 1e-3
    ]
    for layer, norms in _collect_norms(steps).items():
        name, quarter, whole = layer or "the model", max(len(norms) // 4, 1), statistics.median(norms)
        first, last = statistics.median(norms[:quarter]), statistics.median(norms[-quarter:])
        if whole < _VANISHED_NORM:
            found.append(f"- the gradient of `{name}` vanished: its median norm is {whole:.2g}")
        elif last > _EXPLODED_FACTOR * first or math.isinf(last):
            found.append(f"- the gradient of `{name}` exploded: its median norm went from {first:.2g} to {last:.2g}")
    return found


def _collect_norms(steps: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    norms: dict[str, list[float]] = {}
    for record in steps:
        for layer, norm in record.get("layers", {}).items():
            norms.setdefault(layer, []).append(math.inf if norm is None else norm)
    return norms


def is_falling(losses: list[float]) -> bool:
    """Return whether the validation loss fell in the last fifth of the run at over a quarter of its average speed."""
    tail = max(len(losses) // 5, 1)
    return losses[-1 - tail] - losses[-1] > 0.25 * tail / (len(losses) - 1) * (losses[0] - losses[-1])
