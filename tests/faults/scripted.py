"""A small network with epochs of a hundredth of a second, which obeys orders for the objective's code."""

from __future__ import annotations

import os
from typing import Any

import torch
from sklearn.datasets import load_wine
from torch import nn

from hpsearch import Dataset, Objective, Splits, Standardize, TrainConfig
from tests.faults.orders import obey

EPOCHS = 4


class Obedient(nn.CrossEntropyLoss):
    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            obey("training")
        return super().forward(output, target)


class Scripted(Objective):
    name = "scripted"
    epochs = EPOCHS
    n_trials = 4

    def suggest(self, trial: Any) -> TrainConfig:
        obey("suggest")
        return TrainConfig(
            lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True),
            weight_decay=trial.suggest_float("weight_decay", 1e-5, 1e-1, log=True),
            batch_size=32,
            ema_decay=0.9,
            strategy=os.environ.get("STRATEGY", "ddp"),
            shard_checkpoint_above_gib=0.0,
        )

    def data(self, seed: int) -> Splits:
        x, y = load_wine(return_X_y=True)
        return Splits.make(x, y, seed=seed)

    def model(self, config: TrainConfig, train: Dataset) -> nn.Module:
        dropout = nn.Dropout(float(os.environ.get("DROPOUT", "0.2")))
        return nn.Sequential(Standardize.fit(train.x), nn.Linear(13, 16), dropout, nn.Linear(16, 3))

    def loss(self, config: TrainConfig, train: Dataset) -> nn.Module:
        return Obedient()

    # Accuracy on 36 samples is often equal in two trials. The loss differs.
    metric = "loss"
    direction = "minimize"
