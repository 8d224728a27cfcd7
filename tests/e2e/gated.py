"""An objective whose third epoch waits for a file, so that a test can kill its worker during a trial.

The variable GATE is a folder. The worker writes `reached-PID` there and waits until `open` exists. A file `pass-N` lets
one worker continue, which deletes the file.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import torch
from sklearn.datasets import load_wine
from torch import nn

from hpsearch import Dataset, Objective, Splits, Standardize, TrainConfig
from hpsearch.objectives.training.reports import run_dir

# No test uses these plots, and drawing them takes half of the time of such a trial.
run_dir.plot_curves = run_dir.plot_gradient_norms = lambda *_args, **_kwargs: None  # type: ignore[assignment]

BATCHES = 3  # a training epoch of 106 samples in batches of 32, the last one dropped


def take_pass(gate: Path) -> bool:
    """Delete one of the gate's passes; return whether there was one."""
    for each in gate.glob("pass-*"):
        with contextlib.suppress(FileNotFoundError):  # another worker was faster
            each.unlink()
            return True
    return False


class Gate(nn.CrossEntropyLoss):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.steps += torch.is_grad_enabled()
        if self.steps == 2 * BATCHES + 1 and "GATE" in os.environ and "worker" in sys.argv:
            gate = Path(os.environ["GATE"])
            (gate / f"reached-{os.getpid()}").touch()
            parent = os.getppid()
            while not ((gate / "open").exists() or take_pass(gate)) and os.getppid() == parent:
                time.sleep(0.01)
        return super().forward(output, target)


class Gated(Objective):
    name = "gated"
    epochs = 5
    n_trials = 2

    def suggest(self, trial):
        return TrainConfig(lr=trial.suggest_float("lr", 1e-4, 1e-1, log=True), batch_size=32)

    def data(self, seed: int) -> Splits:
        x, y = load_wine(return_X_y=True)
        return Splits.make(x, y, seed=seed)

    def model(self, config: TrainConfig, train: Dataset) -> nn.Module:
        return nn.Sequential(Standardize.fit(train.x), nn.Linear(13, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))

    def loss(self, config: TrainConfig, train: Dataset) -> nn.Module:
        return Gate()
