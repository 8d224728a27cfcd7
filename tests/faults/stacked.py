"""An objective whose folds train as one vectorized model: many steps of a small network."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hpsearch import Dataset, Objective, Splits, Standardize, TrainConfig


class Stacked(Objective):
    name = "stacked"
    epochs = 5
    n_trials = 4
    metric = "loss"
    direction = "minimize"

    def suggest(self, trial: Any) -> TrainConfig:
        return TrainConfig(lr=trial.suggest_float("lr", 1e-4, 1e-2, log=True), batch_size=1)

    def data(self, seed: int) -> Splits:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(1300, 4, generator=generator)
        return Splits.make(x, (x[:, 0] > x[:, 1] ** 2).long(), seed=seed)

    def model(self, config: TrainConfig, train: Dataset) -> nn.Module:
        return nn.Sequential(Standardize.fit(train.x), nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))
