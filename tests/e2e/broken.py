"""An objective that cannot be trained. The environment variable BREAK selects the reason."""

from __future__ import annotations

import os
import sys

import torch
from sklearn.datasets import load_wine
from torch import nn

from hpsearch import Dataset, Objective, Splits, TrainConfig


class Broken(Objective):
    name = "broken"
    epochs = 3
    n_trials = 6

    def suggest(self, trial):
        return TrainConfig(lr=trial.suggest_float("lr", 1e-4, 1e-1, log=True))

    def data(self, seed: int) -> Splits:
        x, y = load_wine(return_X_y=True)
        return Splits.make(x, y, seed=seed)

    def model(self, config: TrainConfig, train: Dataset) -> nn.Module:
        how = os.environ["BREAK"]
        if how == "everywhere" or (how == "in workers" and "HPSEARCH_FLEET_PID" in os.environ):
            raise KeyError("no such layer [1, 2] [/red]")
        if how == "exit" and "HPSEARCH_FLEET_PID" in os.environ:
            sys.exit(3)
        return nn.Sequential(nn.Linear(13, 3), *([] if how == "after a rung" else [Exploding()]))

    def on_epoch(self, model: nn.Module, epoch: int, config: TrainConfig) -> None:
        if epoch == 2 and os.environ["BREAK"] == "after a rung" and "HPSEARCH_FLEET_PID" in os.environ:
            raise KeyError("no such epoch")


class Exploding(nn.Module):
    """Gives infinities to every third forward pass in training."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return x * float("inf") if self.calls >= 3 else x
