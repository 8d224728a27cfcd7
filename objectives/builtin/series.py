"""Carbon dioxide on Mauna Loa, week by week from 1958 to 2001: its next quarter of a year."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from hpsearch.objectives.errors import require_package
from hpsearch.objectives.objective import Objective
from hpsearch.objectives.training.config import TrainConfig
from hpsearch.objectives.training.data.dataset import Dataset
from hpsearch.objectives.training.data.split_rows import Blocks
from hpsearch.objectives.training.data.splits import Splits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpsearch.objectives.search_space import TrialProtocol

YEAR = 52  # weeks
PAST, FUTURE = 2 * YEAR, 13  # weeks that are known, and that are forecast


class Series(Objective):
    """Forecasts 13 weeks of the air's carbon dioxide (statsmodels' `co2`, by Keeling et al.) from two years before.

    Judged by the mean absolute error, in parts per million. The split is by time, 60/20/20: a forecast belongs to the
    split in which all of its 13 weeks lie, so that no value is forecast in two splits; what is known before it may lie
    in the split before.
    """

    name: ClassVar[str] = "series"
    metric = "mae"
    direction = "minimize"
    epochs: ClassVar[int] = 20
    # One hidden layer.
    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 0.003,
        "weight_decay": 0.01,
        "batch_size": 32,
        "ema_decay": 0.99,
        "layers": 1,
        "width": 64,
        "dropout": 0.0,
    }

    def suggest(self, trial: TrialProtocol) -> TrainConfig:
        """An MLP, or with no layer a linear forecast, and how to train it."""
        return TrainConfig(
            lr=trial.suggest_float("lr", 1e-4, 1e-2, log=True),
            weight_decay=trial.suggest_float("weight_decay", 1e-4, 1.0, log=True),
            batch_size=trial.suggest_categorical("batch_size", [16, 32, 64]),
            ema_decay=trial.suggest_categorical("ema_decay", [None, 0.99]),
            model={
                "layers": trial.suggest_int("layers", 0, 2),
                "width": trial.suggest_int("width", 16, 128, log=True),
                "dropout": trial.suggest_float("dropout", 0.0, 0.3),
            },
        )

    def data(self, seed: int) -> Splits:  # noqa: ARG002 time decides
        """Windows [n, 104] and what follows them [n, 13], in parts per million, numbered by the first week forecast."""
        values = weekly()
        first, second = round(0.6 * len(values)), round(0.8 * len(values))
        val = windows(values, first, second)
        test = windows(values, second, len(values))
        return Splits(windows(values, PAST, first), val, test, Blocks(np.arange(len(val)), ordered=True))

    def model(self, config: TrainConfig, train: Dataset) -> nn.Module:
        """[n, 104] weeks -> [n, 13] weeks that follow, in parts per million."""
        return Forecast(float((train.x - train.x[:, -1:]).std()), **{**self.default_config().model, **config.model})


def weekly() -> Tensor:
    """Return the series [2284] in parts per million; a week without a measurement repeats the week before."""
    with require_package("statsmodels", "series"):
        from statsmodels.datasets import co2
    table: Any = co2.load_pandas().data
    return torch.tensor(table["co2"].ffill().to_numpy(), dtype=torch.float32)


def windows(values: Tensor, start: int, end: int) -> Dataset:
    """The forecasts whose weeks lie within `start` to `end`, each with the two years before it."""
    rows = torch.arange(start, end - FUTURE + 1)
    whole = torch.stack([values[row - PAST : row + FUTURE] for row in rows.tolist()])
    return Dataset(whole[:, :PAST], whole[:, PAST:], rows)


class Forecast(nn.Module):
    """What is added to the last value that is known, from how those before differed from it: no level is learned."""

    def __init__(self, scale: float, layers: int, width: int, dropout: float) -> None:
        super().__init__()
        self.scale = scale
        self.net, before = nn.Sequential(), PAST
        for _ in range(layers):
            self.net.extend([nn.Linear(before, width), nn.ReLU(), nn.Dropout(dropout)])
            before = width
        self.net.append(nn.Linear(before, FUTURE))

    def forward(self, x: Tensor) -> Tensor:
        """The weeks that follow."""
        last = x[:, -1:]
        change: Tensor = self.net((x - last) / self.scale)
        return last + self.scale * change
