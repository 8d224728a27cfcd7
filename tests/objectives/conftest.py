"""A small real objective, and ways to change one part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sklearn.datasets import load_wine
from torch import nn

from objectives import Objective
from objectives.training import Splits, Standardize, TrainConfig
from objectives.training.reports import run_dir


class Wine(Objective):
    """178 wines, 13 measurements, three growers; no dropout or batch norm, so that gradients can be compared."""

    metric = "accuracy"
    epochs = 4

    def suggest(self, trial):
        return TrainConfig(lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True))

    def data(self, seed):
        x, y = load_wine(return_X_y=True)
        return Splits.make(x, y, seed=seed)

    def model(self, config, train):
        net = nn.Sequential(nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 3))
        return nn.Sequential(Standardize.fit(train.x), net)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that look at none: drawing them takes longer than such short runs take otherwise."""
    for name in ("curves", "gradient_flow"):
        monkeypatch.setattr(run_dir, name, lambda *_args, **_kwargs: None)


@pytest.fixture
def wine() -> Objective:
    return Wine()


@pytest.fixture
def objective_with() -> Callable[..., Objective]:
    """Makes a Wine objective with some of its attributes replaced."""

    def make(**replaced: Any) -> Objective:
        return type("Changed", (Wine,), replaced)()

    return make
