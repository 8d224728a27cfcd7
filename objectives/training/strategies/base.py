"""A strategy: how ranks share the work of one model."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

from torch import Tensor, nn

from objectives.training.config import TrainConfig
from objectives.training.data.dataset import Batch
from objectives.training.evaluation.step import Step, Stepping
from objectives.training.ranks import Ranks


class Strategy:
    """One process, and what the strategies of several have in common.

    Args:
        ranks: that train together.
        config: of the run.

    Attributes:
        name: as `TrainConfig.strategy` has it.
    """

    name: ClassVar[str] = "one process"

    def __init__(self, ranks: Ranks, config: TrainConfig) -> None:
        self._ranks, self._config = ranks, config

    def place(self, model: nn.Module) -> None:
        """Before the optimizer is made: gives each rank its part of a model that is the same on all."""

    def begin(self, model: nn.Module, stepping: Stepping) -> None:
        """Before the first step, and after all that changes the model's parameters."""
        self._model, self._stepping = model, stepping

    def begin_epoch(self) -> None:
        """Before an epoch: the objective may have frozen layers, or thawed some."""

    def step(self, batch: Batch, autocast: AbstractContextManager[None], *, more: bool = False) -> Step:  # noqa: ARG002
        """The step of a micro-batch in training.

        Args:
            batch: on the device.
            autocast: of the model's part of it.
            more: whether gradients of further micro-batches are added to its own before they are used.
        """
        return self._stepping(self._model, batch, autocast)

    def agree(self, *models: nn.Module) -> None:
        """After an epoch: gives models the same buffers on all ranks."""

    def whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state dict whose tensors are whole, on every rank together; of use on rank 0."""
        return state

    def own(self, state: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002 of a sharded one
        """What this rank has of a state dict with whole tensors; `like` is this rank's state dict of today."""
        return state

    def efficiency(self) -> float | None:
        """What share of a step's time is not spent waiting for other ranks, lately; None where nobody measures it."""
        return None

    def norm(self, norm: Tensor) -> Tensor:
        """A gradient's norm over all ranks."""
        return norm
