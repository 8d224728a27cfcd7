"""An objective with steps of STEP_SECONDS, so that an engine has time to kill or stop its workers.

Each worker needs START_SECONDS before its first step. A worker for which there is a file EXHAUST-PID removes this file
and allocates memory until the kernel kills the worker.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn

from hpsearch import Dataset, Splits, TrainConfig
from tests.faults.scripted import Scripted


def exhaust_memory() -> None:
    """Allocate memory until the kernel kills this process; fail at 4 GiB, where no limit is enforced."""
    blocks = [bytearray(b"x") * (16 << 20) for _ in range(256)]
    raise AssertionError(f"no limit of memory: {len(blocks)} blocks of 16 MiB")


class Slow(nn.CrossEntropyLoss):
    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            if "EXHAUST" in os.environ and (file := Path(f"{os.environ['EXHAUST']}-{os.getpid()}")).exists():
                file.unlink()
                exhaust_memory()
            time.sleep(float(os.environ.get("STEP_SECONDS", "0")))  # seconds per step
        return super().forward(output, target)


class Paced(Scripted):
    name = "paced"

    def data(self, seed: int) -> Splits:
        time.sleep(float(os.environ.get("START_SECONDS", "0")))
        return super().data(seed)

    def loss(self, config: TrainConfig, train: Dataset) -> nn.Module:
        return Slow()
