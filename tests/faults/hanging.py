"""The scripted network, and a custom loop, with more places at which a rank obeys orders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpsearch import Dataset, LoopObjective, Splits, TrainConfig
from tests.faults.orders import obey
from tests.faults.scripted import EPOCHS, Obedient, Scripted


class Watched(Obedient):
    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            obey("evaluation")
        return super().forward(output, target)


class Hanging(Scripted):
    name = "hanging"

    def data(self, seed: int) -> Splits:
        obey("data")
        return super().data(seed)

    def model(self, config: TrainConfig, train: Dataset) -> nn.Module:
        obey("model")
        return super().model(config, train)

    def on_epoch(self, model: nn.Module, epoch: int, config: TrainConfig) -> None:
        if epoch == 0:
            obey("before the first step")

    def loss(self, config: TrainConfig, train: Dataset) -> nn.Module:
        return Watched()


class Preparing(Scripted):
    name = "preparing"

    def prepare(self, folder: Path) -> None:
        obey("prepare")

    def data(self, seed: int) -> Splits:
        assert self.prepared.is_dir()
        return super().data(seed)


class OwnLoop(LoopObjective):
    """Its metric is the number of the epoch."""

    name, metric, direction = "own", "epoch", "maximize"
    epochs, n_trials = EPOCHS, 1

    def suggest(self, trial: Any) -> dict[str, float]:
        return {"scale": trial.suggest_float("scale", 1.0, 2.0)}

    def run(self, trial: Any) -> None:
        for epoch in trial.epochs():
            obey("before report")
            trial.report({"epoch": float(epoch)}, state={"epoch": epoch})
