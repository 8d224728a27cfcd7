"""Weekly carbon dioxide on Mauna Loa, 1958 to 2001: a forecast of the next quarter of a year."""

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

WEEKS_PER_YEAR = 52  # weeks
INPUT_WEEKS, FORECAST_WEEKS = 2 * WEEKS_PER_YEAR, 13  # weeks of input and of forecast


class Series(Objective):
    """Forecast of 13 weeks of atmospheric carbon dioxide (statsmodels' `co2`, by Keeling et al.) from 104 weeks.

    The metric is the mean absolute error, in parts per million. The split is by time, 60/20/20. A forecast belongs to
    the split that contains all of its 13 weeks, so no value is forecast in two splits. The input weeks of a forecast
    may belong to the preceding split.
    """

    name: ClassVar[str] = "series"
    metric = "mae"
    direction = "minimize"
    epochs: ClassVar[int] = 20
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
        """Suggest an MLP (with 0 hidden layers: a linear forecast) and the training settings."""
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

    def data(self, seed: int) -> Splits:  # noqa: ARG002 the split is by time
        """Return the values of 104 weeks [n, 104] and of the next 13 weeks [n, 13], in parts per million."""
        values = load_weekly_values()
        first, second = round(0.6 * len(values)), round(0.8 * len(values))
        val = make_windows(values, first, second)
        test = make_windows(values, second, len(values))
        return Splits(make_windows(values, INPUT_WEEKS, first), val, test, Blocks(np.arange(len(val)), ordered=True))

    def model(self, config: TrainConfig, train: Dataset) -> nn.Module:
        """Return a network from the values of 104 weeks [n, 104] to those of the next 13 weeks [n, 13]."""
        return Forecast(float((train.x - train.x[:, -1:]).std()), **{**self.default_config().model, **config.model})


def load_weekly_values() -> Tensor:
    """Return the series [2284] in parts per million; a week without a measurement has the value of the week before."""
    with require_package("statsmodels", "series"):
        from statsmodels.datasets import co2
    table: Any = co2.load_pandas().data
    return torch.tensor(table["co2"].ffill().to_numpy(), dtype=torch.float32)


def make_windows(values: Tensor, start: int, end: int) -> Dataset:
    """Return samples whose 13 target weeks are in [`start`, `end`); the inputs are the two years before the targets."""
    rows = torch.arange(start, end - FORECAST_WEEKS + 1)
    weeks = torch.stack([values[row - INPUT_WEEKS : row + FORECAST_WEEKS] for row in rows.tolist()])
    return Dataset(weeks[:, :INPUT_WEEKS], weeks[:, INPUT_WEEKS:], rows)


class Forecast(nn.Module):
    """Network whose inputs and outputs are differences to the last known value, so it learns no absolute level."""

    def __init__(self, scale: float, layers: int, width: int, dropout: float) -> None:
        super().__init__()
        self.scale = scale
        self.net, before = nn.Sequential(), INPUT_WEEKS
        for _ in range(layers):
            self.net.extend([nn.Linear(before, width), nn.ReLU(), nn.Dropout(dropout)])
            before = width
        self.net.append(nn.Linear(before, FORECAST_WEEKS))

    def forward(self, x: Tensor) -> Tensor:
        """Return the predicted values of the next 13 weeks [n, 13]."""
        last = x[:, -1:]
        change: Tensor = self.net((x - last) / self.scale)
        return last + self.scale * change
