"""Records of optimizer steps: loss and gradient norm per layer, which show vanishing and exploding gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hpsearch.objectives.training.loop.guards import StepPosition

DENSE_STEPS = 20  # first steps that are all recorded, to show a bad start at a low cost for short trials

GradientNorms = Callable[[Sequence[Tensor]], Tensor]


class StepLog:
    """Records of the first 20 steps, and of every `every`-th step. Values stay on the device until `drain` reads them.

    A record has `epoch`, `step`, `lr`, `loss` (the mean over the samples of the step), `grad_norm` and `layers`. The
    entries of `layers` are gradient norms before clipping, by module name; a norm covers the module's own parameters,
    without its submodules.

    Args:
        model: the objective's model before a strategy changes the classes of its layers and shards its parameters.
        every: steps between records; None records nothing.
        norms: function that returns the norms [n] of n gradients.
    """

    def __init__(self, model: nn.Module, every: int | None, norms: GradientNorms) -> None:
        self._model, self._every, self._norms = model, every, norms
        self._trained = {name for name, p in model.named_parameters() if p.requires_grad}
        self._layers = {name: _format_layer_name(name, module) for name, module in model.named_modules()}
        self._pending: list[tuple[StepPosition, Tensor, list[str], Tensor]] = []
        self._scores: list[dict[str, Any]] = []

    def record_step(self, point: StepPosition, loss: Tensor) -> None:
        """Record a step if a record is due; the gradients must be unscaled and not clipped."""
        if self._every is None or (point.step >= DENSE_STEPS and point.step % self._every):
            return
        named = [(name, p.grad) for name, p in self._model.named_parameters() if name in self._trained]
        with_grad = [(name, grad) for name, grad in named if grad is not None]
        norms = self._norms([grad for _, grad in with_grad])
        self._pending.append((point, loss.detach(), [name for name, _ in with_grad], norms))

    def add_scores(self, epoch: int, step: int, scores: dict[str, float]) -> None:
        """Add the scores of a validation within an epoch."""
        self._scores.append({"epoch": epoch, "step": step, **{f"val_{name}": value for name, value in scores.items()}})

    def drain(self) -> list[dict[str, Any]]:
        """Return the records since the last call of `drain` as JSON values, in the order of steps."""
        pending, self._pending = self._pending, []
        scores, self._scores = self._scores, []
        if pending:
            flat = torch.cat([torch.cat([loss.float().reshape(1), norms]) for _, loss, _, norms in pending]).tolist()
            for point, _, names, _ in pending:
                loss, values, flat = flat[0], flat[1 : len(names) + 1], flat[len(names) + 1 :]
                scores.append(self._record(point, loss, dict(zip(names, values, strict=True))))
        return sorted(scores, key=lambda record: int(record["step"]))

    def _record(self, point: StepPosition, loss: float, norms: dict[str, float]) -> dict[str, Any]:
        squares: dict[str, float] = {}
        for name, norm in norms.items():
            module = self._layers[name.rpartition(".")[0]]
            squares[module] = squares.get(module, 0.0) + norm * norm
        return {
            "epoch": point.epoch,
            "step": point.step,
            "lr": point.lr,
            "loss": _finite_or_none(loss),
            "grad_norm": _finite_or_none(math.sqrt(sum(squares.values()))),
            "layers": {module: _finite_or_none(math.sqrt(square)) for module, square in squares.items()},
        }


def _format_layer_name(name: str, module: nn.Module) -> str:
    """Return a module's name in the model, with its class if the name ends with a number, as in a sequence."""
    return name if name.rpartition(".")[2].isidentifier() else f"{name} {type(module).__name__}".strip()


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
