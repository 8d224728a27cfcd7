"""The scripted network and a custom loop, both with loader processes, which obey orders too."""

from __future__ import annotations

import dataclasses
import multiprocessing
import signal
import subprocess
from typing import Any

import torch
from torch.utils import data

from hpsearch import LoopObjective, TrainConfig
from tests.faults.orders import obey
from tests.faults.scripted import EPOCHS, Scripted


class Loading(Scripted):
    def suggest(self, trial: Any) -> TrainConfig:
        return dataclasses.replace(super().suggest(trial), num_workers=2)


class Longer(Scripted):
    """The same with 26 steps per epoch."""

    def suggest(self, trial: Any) -> TrainConfig:
        return dataclasses.replace(super().suggest(trial), batch_size=4)


def receives(number: int) -> bool:
    """Return whether a program that this process executes neither ignores nor blocks a signal."""
    command = ["cat", "/proc/self/status"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == -number:  # the test's own signal to all processes
        return True
    if done.returncode < 0:  # another signal of the test, which is sent once
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    masks = [int(line.split()[1], 16) for line in done.stdout.splitlines() if line.startswith(("SigIgn", "SigBlk"))]
    assert len(masks) == 2
    return not any(mask >> (number - 1) & 1 for mask in masks)


class Rows(data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        obey("loading")
        assert receives(signal.SIGTERM), "a program that is executed here would not receive SIGTERM"
        return torch.full((), float(index))


class OwnLoop(LoopObjective):
    """Its metric is the sum of the batches of its own loader and of the results of a process pool."""

    name, metric, direction = "own", "total", "maximize"
    epochs, n_trials = EPOCHS, 1

    def suggest(self, trial: Any) -> dict[str, float]:
        return {"scale": trial.suggest_float("scale", 1.0, 2.0)}

    def run(self, trial: Any) -> None:
        total = trial.state["total"] if trial.state else 0.0
        for _epoch in trial.epochs():
            loader = data.DataLoader(Rows(), batch_size=2, num_workers=2)
            for number, batch in enumerate(loader):
                if number == 1:
                    obey("training")
                total += trial.config["scale"] * float(batch.sum())
            with multiprocessing.Pool(1) as pool:
                total += sum(pool.map(abs, [-1.0]))
            trial.report({"total": total}, state={"total": total})
