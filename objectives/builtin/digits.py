"""Handwritten digits: 1,797 scanned images of 8x8 pixels, ten classes."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from hpsearch.objectives.objective import Objective
from hpsearch.objectives.training.config import TrainConfig
from hpsearch.objectives.training.data.dataset import Dataset
from hpsearch.objectives.training.data.preprocess import Standardize
from hpsearch.objectives.training.data.splits import Splits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpsearch.objectives.search_space import TrialProtocol

CLASSES = 10
_LR = {"adamw": (1e-4, 1e-1), "sgd": (1e-3, 1.0)}  # each optimizer has its own scale
_WIDTH: dict[str, Any] = {"cnn": {"low": 8, "high": 32, "step": 8}, "mlp": {"low": 32, "high": 256, "log": True}}


class Digits(Objective):
    """Classification of scikit-learn's digits (the test part of UCI optdigits) with a small CNN or an MLP.

    The split is random and stratified, 60/20/20. It cannot be grouped by writer, because the data do not name the
    writers.
    """

    name: ClassVar[str] = "digits"
    metric = "accuracy"
    epochs: ClassVar[int] = 20
    defaults: ClassVar[Mapping[str, Any]] = {
        "model": "cnn",
        "optimizer": "adamw",
        "adamw_lr": 0.01,
        "weight_decay": 0.01,
        "batch_size": 64,
        "schedule": "cosine",
        "label_smoothing": 0.1,
        "cnn_layers": 2,
        "cnn_width": 32,
        "cnn_dropout": 0.3,
    }

    def suggest(self, trial: TrialProtocol) -> TrainConfig:
        """Suggest a CNN or an MLP, each with its own parameters, and the training settings."""
        kind = trial.suggest_categorical("model", ["cnn", "mlp"])
        optimizer = trial.suggest_categorical("optimizer", ["adamw", "sgd"])
        return TrainConfig(
            optimizer=optimizer,
            lr=trial.suggest_float(f"{optimizer}_lr", *_LR[optimizer], log=True),
            weight_decay=trial.suggest_float("weight_decay", 1e-5, 1e-1, log=True),
            batch_size=trial.suggest_categorical("batch_size", [32, 64, 128]),
            schedule=trial.suggest_categorical("schedule", ["cosine", "one_cycle", "constant"]),
            label_smoothing=trial.suggest_float("label_smoothing", 0.0, 0.2),
            model={
                "kind": kind,
                "layers": trial.suggest_int(f"{kind}_layers", 1, 3),
                "width": trial.suggest_int(f"{kind}_width", **_WIDTH[kind]),
                "dropout": trial.suggest_float(f"{kind}_dropout", 0.0, 0.5),
            },
        )

    def data(self, seed: int) -> Splits:
        """Return images [n, 1, 8, 8] with pixels 0 to 16, and labels [n]."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        return Splits.make(digits.images[:, None], digits.target, seed=seed)

    def model(self, config: TrainConfig, train: Dataset) -> nn.Module:
        """Return a network [n, 1, 8, 8] -> [n, 10] from raw pixels, which it standardizes, to logits."""
        settings = {**self.default_config().model, **config.model}
        net = _NETWORKS[settings.pop("kind")](**settings)
        return nn.Sequential(Standardize.fit(train.x, dim=(0, 2, 3)), net)


def build_cnn(layers: int, width: int, dropout: float) -> nn.Sequential:
    """Return a network [n, 1, 8, 8] -> [n, 10]: 3x3 convolutions with batch norm, and 2x2 pooling after the first."""
    widths = [1, *(width * (1 if layer == 0 else 2) for layer in range(layers))]
    net = nn.Sequential()
    for layer, (before, after) in enumerate(pairwise(widths)):
        net.extend([nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()])
        if layer == 0:
            net.append(nn.MaxPool2d(2))
    net.extend([nn.Flatten(), nn.Dropout(dropout), nn.Linear(widths[-1] * 16, CLASSES)])
    return init_weights(net)


def build_mlp(layers: int, width: int, dropout: float) -> nn.Sequential:
    """Return a network [n, 1, 8, 8] -> [n, 10] with hidden layers of equal width."""
    net = nn.Sequential(nn.Flatten())
    for before in [64, *[width] * (layers - 1)]:
        net.extend([nn.Linear(before, width), nn.ReLU(), nn.Dropout(dropout)])
    net.append(nn.Linear(width, CLASSES))
    return init_weights(net)


def init_weights(net: nn.Sequential) -> nn.Sequential:
    """Initialize layers before a ReLU as in He et al. 2015, and the last layer for nearly uniform predictions."""
    for module in net:
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    last = net[-1]
    if isinstance(last, nn.Linear):
        nn.init.normal_(last.weight, std=0.01)
    return net


_NETWORKS = {"cnn": build_cnn, "mlp": build_mlp}
