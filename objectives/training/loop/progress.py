"""How a run has gone so far: its history, its best epoch, its patience."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord


@dataclass
class Progress:
    """The record of a run, by the validation metric in its direction.

    Attributes:
        key: the record's metric that decides, such as `val_accuracy`.
        maximize: whether higher is better.
        keep_last: whether the last epoch is kept for the best: a refit has nothing unbiased left to choose by.
        history: one record an epoch.
        best: `epoch`, `value`, `metrics` and `model` (weights) of the best epoch; empty before the first.
    """

    key: str
    maximize: bool
    keep_last: bool = False
    history: list[EpochRecord] = field(default_factory=list)
    best: dict[str, Any] = field(default_factory=dict)

    @property
    def next_epoch(self) -> int:
        """The epoch to train next."""
        return len(self.history)

    @property
    def stale(self) -> int:
        """Epochs since the best one."""
        return len(self.history) - 1 - int(self.best["epoch"]) if self.best else 0

    def add(self, record: EpochRecord, weights: Callable[[], dict[str, Tensor]]) -> bool:
        """Adds an epoch; True when it is the best so far, or the last is kept, and its weights were kept."""
        self.history.append(record)
        value = record.metrics[self.key]
        if self.best and not self.keep_last and not self._better(value):
            return False
        self.best = {"epoch": record.epoch, "value": value, "metrics": record.metrics, "model": weights()}
        return True

    def _better(self, value: float) -> bool:
        return bool(value > self.best["value"] if self.maximize else value < self.best["value"])

    def state_dict(self) -> dict[str, Any]:
        """The record as plain values and tensors."""
        history = [{"epoch": r.epoch, "timestamp": r.timestamp, "metrics": dict(r.metrics)} for r in self.history]
        return {"history": history, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        self.history = [EpochRecord(**record) for record in state["history"]]
        self.best = state["best"]
