"""A run: the parts that train together, and their state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from objectives.training.config import TrainConfig
from objectives.training.data import Dataset, Splits
from objectives.training.evaluate import evaluate
from objectives.training.guards import FiniteGuard
from objectives.training.metrics import Metrics
from objectives.training.precision import Precision
from objectives.training.progress import Progress

FORMAT = 1  # of a checkpoint's state
_EVAL_FACTOR = 4  # an evaluation keeps no activations, so it takes larger batches than training


@dataclass
class Run:
    """The parts of a run, on its device.

    Attributes:
        identity: what makes it this run: objective, configuration, epochs, seeds and data; plain values.
        environment: what it runs on; plain values.
        splits: as the objective gave them, on the CPU.
        train, val: on the device.
        step: optimizer steps tried so far.
        notes: what kept a resume from being exact.
    """

    identity: dict[str, Any]
    environment: dict[str, Any]
    config: TrainConfig
    epochs: int
    seed: int
    device: torch.device
    splits: Splits
    train: Dataset
    val: Dataset
    model: nn.Module
    loss: nn.Module
    metrics: Metrics
    optimizer: Optimizer
    schedule: LRScheduler
    precision: Precision
    ema: AveragedModel | None
    guard: FiniteGuard
    progress: Progress
    step: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def judged(self) -> nn.Module:
        """The model whose weights are judged and kept: the moving average where there is one."""
        return self.model if self.ema is None else self.ema.module

    @property
    def finished(self) -> bool:
        """Whether the budget of epochs, or the patience, is spent."""
        patience = self.config.patience
        out_of_patience = patience is not None and self.progress.stale >= patience
        return out_of_patience or self.progress.next_epoch >= self.epochs

    def weights(self) -> dict[str, Tensor]:
        """A copy of the judged weights and buffers."""
        return {name: tensor.detach().clone() for name, tensor in self.judged.state_dict().items()}

    def validate(self) -> dict[str, float]:
        """Loss and metrics of the judged model on the validation split."""
        batch = self.config.eval_batch_size or _EVAL_FACTOR * self.config.batch_size
        return evaluate(self.judged, self.val, self.loss, self.metrics, batch_size=batch, device=self.device)

    def state_dict(self) -> dict[str, Any]:
        """All that a checkpoint holds, as plain values and the run's own tensors.

        No generator is in it: every epoch seeds them from (seed, epoch), so a resume is exact without.
        """
        return {
            **self.identity,
            "environment": self.environment,
            "notes": self.notes,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.precision.state_dict(),
            "ema": None if self.ema is None else self.ema.state_dict(),
            "step": self.step,
            "skipped": self.guard.skipped,
            **self.progress.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` gave, but for identity and environment."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.precision.load_state_dict(state["scaler"])
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        self.step, self.guard.skipped, self.notes = state["step"], state["skipped"], state["notes"]
        self.progress.load_state_dict(state)
