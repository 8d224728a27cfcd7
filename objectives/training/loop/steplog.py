"""A record of single steps: the loss, and the gradient's norm in every layer, where vanishing and exploding show."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hpsearch.objectives.training.loop.guards import StepPosition

DENSE = 20  # steps noted each, where a bad start shows; few enough that a short trial costs no more

Norms = Callable[[Sequence[Tensor]], Tensor]


class StepLog:
    """Notes the first steps, then each `every`-th; the numbers stay on the device until `drain` reads them at once.

    Each record has `epoch`, `step`, `lr`, `loss` (the mean of its samples), `grad_norm` and `layers`: the norm of the
    gradient of each module's own parameters, before clipping, by the module's name in the model.

    Args:
        model: as the objective gave it: on several ranks its layers change their classes, and its parameters places.
        every: None notes nothing.
        norms: the norm of each of some gradients [n].
    """

    def __init__(self, model: nn.Module, every: int | None, norms: Norms) -> None:
        self._model, self._every, self._norms = model, every, norms
        self._trained = {name for name, p in model.named_parameters() if p.requires_grad}
        self._layers = {name: _called(name, module) for name, module in model.named_modules()}
        self._pending: list[tuple[StepPosition, Tensor, list[str], Tensor]] = []
        self._scores: list[dict[str, Any]] = []

    def record_step(self, point: StepPosition, loss: Tensor) -> None:
        """Notes a step whose gradients are unscaled and not clipped, where it is one of those to note."""
        if self._every is None or (point.step >= DENSE and point.step % self._every):
            return
        named = [(name, p.grad) for name, p in self._model.named_parameters() if name in self._trained]
        with_grad = [(name, grad) for name, grad in named if grad is not None]
        norms = self._norms([grad for _, grad in with_grad])
        self._pending.append((point, loss.detach(), [name for name, _ in with_grad], norms))

    def add_scores(self, epoch: int, step: int, scores: dict[str, float]) -> None:
        """Adds a validation within an epoch."""
        self._scores.append({"epoch": epoch, "step": step, **{f"val_{name}": value for name, value in scores.items()}})

    def drain(self) -> list[dict[str, Any]]:
        """The records since the last call, as JSON values, in the order of steps."""
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
            "loss": _json(loss),
            "grad_norm": _json(math.sqrt(sum(squares.values()))),
            "layers": {module: _json(math.sqrt(square)) for module, square in squares.items()},
        }


def _called(name: str, module: nn.Module) -> str:
    """A module's name in the model; with its class where that is a mere number, its place in a sequence."""
    return name if name.rpartition(".")[2].isidentifier() else f"{name} {type(module).__name__}".strip()


def _json(value: float) -> float | None:
    return value if math.isfinite(value) else None
