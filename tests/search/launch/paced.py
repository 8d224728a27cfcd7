"""An objective with steps of STEP_SECONDS, so that an engine has time to kill or stop its workers.

Each worker needs START_SECONDS before its first step.
"""

from __future__ import annotations

import os
import time

import torch
from torch import nn

from hpsearch import Dataset, Splits, TrainConfig
from tests.faults.scripted import Scripted


class Slow(nn.CrossEntropyLoss):
    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            time.sleep(float(os.environ.get("STEP_SECONDS", "0")))  # seconds per step
        return super().forward(output, target)


class Paced(Scripted):
    name = "paced"

    def data(self, seed: int) -> Splits:
        time.sleep(float(os.environ.get("START_SECONDS", "0")))
        return super().data(seed)

    def loss(self, config: TrainConfig, train: Dataset) -> nn.Module:
        return Slow()
