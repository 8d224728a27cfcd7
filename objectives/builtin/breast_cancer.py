"""The objective `breast_cancer`: 569 tumor biopsies with 30 measurements each; 37 % of the tumors are malignant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from hpsearch.objectives.objective import Objective
from hpsearch.objectives.training.config import TrainConfig
from hpsearch.objectives.training.data.dataset import Dataset
from hpsearch.objectives.training.data.preprocess import Standardize
from hpsearch.objectives.training.data.splits import Splits
from hpsearch.objectives.training.evaluation.losses import BinaryLogits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpsearch.objectives.search_space import TrialProtocol

# Columns: mean, standard error and worst (largest) value of ten measurements of the cell nuclei.
MEAN, ERROR, WORST = slice(0, 10), slice(10, 20), slice(20, 30)


class BreastCancer(Objective):
    """Classification of malignant (1) and benign (0) tumors in scikit-learn's data set breast_cancer.

    The classes are imbalanced, so the metric is AUROC instead of accuracy. Average precision is also reported, with its
    base rate: the share of malignant tumors.
    """

    name: ClassVar[str] = "breast_cancer"
    metric = "auroc"
    epochs: ClassVar[int] = 30
    defaults: ClassVar[Mapping[str, Any]] = {
        "optimizer": "adamw",
        "lr": 0.003,
        "weight_decay": 0.01,
        "batch_size": 32,
        "schedule": "cosine",
        "label_smoothing": 0.0,
        "layers": 1,
        "width": 32,
        "dropout": 0.1,
        "balance": True,
    }

    def suggest(self, trial: TrialProtocol) -> TrainConfig:
        """Suggest an MLP and the training settings."""
        return TrainConfig(
            optimizer=trial.suggest_categorical("optimizer", ["adamw", "sgd"]),
            lr=trial.suggest_float("lr", 1e-4, 1e-1, log=True),
            weight_decay=trial.suggest_float("weight_decay", 1e-5, 1.0, log=True),
            batch_size=trial.suggest_categorical("batch_size", [16, 32, 64]),
            schedule=trial.suggest_categorical("schedule", ["cosine", "constant"]),
            label_smoothing=trial.suggest_float("label_smoothing", 0.0, 0.2),
            model={
                "layers": trial.suggest_int("layers", 0, 3),
                "width": trial.suggest_int("width", 8, 128, log=True),
                "dropout": trial.suggest_float("dropout", 0.0, 0.5),
                "balance": trial.suggest_categorical("balance", [True, False]),
            },
        )

    def data(self, seed: int) -> Splits:
        """Return measurements [n, 30] and labels [n], where 1 is malignant."""
        from sklearn.datasets import load_breast_cancer

        x, benign = load_breast_cancer(return_X_y=True)
        return Splits.make(x, 1 - benign, seed=seed)

    def model(self, config: TrainConfig, train: Dataset) -> nn.Module:
        """Return a network [n, 30] -> [n, 1] from raw measurements to one logit."""
        settings = self._settings(config)
        net = build_mlp(settings["layers"], settings["width"], settings["dropout"])
        return nn.Sequential(GroupedScaling.fit(train.x), net)

    def loss(self, config: TrainConfig, train: Dataset) -> nn.Module:
        """Return binary cross entropy; with `balance`, positives have the same total weight as negatives."""
        positives = float(train.y.sum())
        weight = (len(train) - positives) / positives if self._settings(config)["balance"] else 1.0
        return BinaryLogits(config.label_smoothing, torch.tensor(weight))

    def _settings(self, config: TrainConfig) -> dict[str, float]:
        return {**self.default_config().model, **config.model}


class GroupedScaling(nn.Module):
    """Standardization [n, 30] -> [n, 30] of three column groups; its buffers contain statistics of the training data.

    The standard errors are skewed and extend over two orders of magnitude, so their logarithm is standardized. The
    means and the worst values are standardized and clamped to five standard deviations, so that one extreme tumor does
    not dominate a batch.
    """

    def __init__(self, mean: Standardize, error: Standardize, worst: Standardize, error_unit: Tensor) -> None:
        super().__init__()
        self.mean, self.error, self.worst = mean, error, worst
        self.register_buffer("error_unit", error_unit)

    error_unit: Tensor

    @classmethod
    def fit(cls, x: Tensor) -> GroupedScaling:
        """Return a module with the statistics of `x` [n, 30], which must contain the training split only."""
        unit = x[:, ERROR].median(dim=0).values.clamp_min(1e-12)
        logs = torch.log1p(x[:, ERROR].clamp_min(0) / unit)
        return cls(Standardize.fit(x[:, MEAN]), Standardize.fit(logs), Standardize.fit(x[:, WORST]), unit)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled columns in the same order."""
        error = self.error(torch.log1p(x[:, ERROR].clamp_min(0) / self.error_unit))
        return torch.cat([self.mean(x[:, MEAN]).clamp(-5, 5), error, self.worst(x[:, WORST]).clamp(-5, 5)], dim=1)


def build_mlp(layers: float, width: float, dropout: float) -> nn.Sequential:
    """Return a network [n, 30] -> [n, 1] with hidden layers of equal width; 0 layers are logistic regression."""
    net, before = nn.Sequential(), 30
    for _ in range(int(layers)):
        linear = nn.Linear(before, int(width))
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        nn.init.zeros_(linear.bias)
        net.extend([linear, nn.ReLU(), nn.Dropout(dropout)])
        before = int(width)
    last = nn.Linear(before, 1)
    nn.init.normal_(last.weight, std=0.01)
    nn.init.zeros_(last.bias)
    net.append(last)
    return net
