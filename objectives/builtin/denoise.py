"""Noisy handwritten digits: a denoising autoencoder with a custom step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from hpsearch.objectives.objective import Objective
from hpsearch.objectives.training.config import TrainConfig
from hpsearch.objectives.training.data.dataset import Batch, Dataset
from hpsearch.objectives.training.data.preprocess import Standardize
from hpsearch.objectives.training.data.splits import Splits
from hpsearch.objectives.training.evaluation.step import Step

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpsearch.objectives.search_space import TrialProtocol

MAX_PIXEL = 16.0  # the largest pixel value
NOISE_DEVIATION = 4.0  # standard deviation of the noise, in pixel values


class Denoise(Objective):
    """Removal of Gaussian noise from scikit-learn's digits; the metric is the peak signal-to-noise ratio, in decibels.

    Each training batch gets new noise (Vincent et al. 2008). The noise of validation and test images is fixed, so that
    all trials are evaluated on the same images. With new noise the loss of a batch, in squared pixel values, does not
    approach 0, so `loss_floor` is above 0.
    """

    name: ClassVar[str] = "denoise"
    metric = "psnr"
    epochs: ClassVar[int] = 40
    loss_floor: ClassVar[float | None] = 0.5
    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 0.003,
        "weight_decay": 0.01,
        "batch_size": 32,
        "ema_decay": None,
        "width": 256,
        "code": 32,
    }

    def suggest(self, trial: TrialProtocol) -> TrainConfig:
        """Suggest the width of the hidden layers, the width of the bottleneck (`code`), and the training settings."""
        return TrainConfig(
            lr=trial.suggest_float("lr", 3e-4, 3e-2, log=True),
            weight_decay=trial.suggest_float("weight_decay", 1e-5, 1e-1, log=True),
            batch_size=trial.suggest_categorical("batch_size", [16, 32, 64]),
            ema_decay=trial.suggest_categorical("ema_decay", [None, 0.99]),
            model={
                "width": trial.suggest_int("width", 64, 512, log=True),
                "code": trial.suggest_int("code", 8, 64, log=True),
            },
        )

    def data(self, seed: int) -> Splits:
        """Return noisy images as inputs and clean images as targets, both [n, 1, 8, 8]; clean pixels are 0 to 16."""
        from sklearn.datasets import load_digits

        clean = load_digits().images[:, None]
        noisy = clean + np.random.default_rng(seed).normal(0, NOISE_DEVIATION, clean.shape)
        return Splits.make(noisy, clean, seed=seed)

    def model(self, config: TrainConfig, train: Dataset) -> nn.Module:
        """Return a network from noisy images [n, 1, 8, 8] to clean images [n, 1, 8, 8]."""
        settings = {**self.default_config().model, **config.model}
        return nn.Sequential(Standardize.fit(train.x, dim=(0, 2, 3)), Autoencoder(**settings))

    def step(self, model: nn.Module, batch: Batch, config: TrainConfig) -> Step:  # noqa: ARG002 part of the protocol
        """Return the mean squared error of each image [n] as loss, and the peak signal-to-noise ratio as metric."""
        noisy = batch.y + NOISE_DEVIATION * torch.randn_like(batch.y) if model.training else batch.x
        error = (model(noisy) - batch.y).square().flatten(1).mean(dim=1)
        return Step(error, metrics={"psnr": 10 * torch.log10(MAX_PIXEL**2 / error.detach()).mean()})


class Autoencoder(nn.Module):
    """Autoencoder of images [n, 1, 8, 8] with a bottleneck of `code` units; the output pixels are 0 to 16."""

    def __init__(self, width: int, code: int) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, code))
        self.decode = nn.Sequential(nn.Linear(code, width), nn.ReLU(), nn.Linear(width, 64))

    def forward(self, x: Tensor) -> Tensor:
        """Return reconstructed images [n, 1, 8, 8]."""
        decoded: Tensor = self.decode(self.encode(x))
        return MAX_PIXEL * decoded.sigmoid().reshape(-1, 1, 8, 8)
