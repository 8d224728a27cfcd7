"""Handwritten digits with noise on them: an autoencoder that takes it off, by a step of its own."""

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

WHITE = 16.0  # the largest pixel
NOISE = 4.0  # the deviation of the noise, in pixels


class Denoise(Objective):
    """Takes normal noise off scikit-learn's digits; judged by the peak signal-to-noise ratio, in decibels.

    Noise is drawn anew for each batch that is trained on (Vincent et al. 2008). Validation and test images have theirs
    once and for all, so that every trial is judged on the same. With fresh noise the loss of a
    batch, in squared pixels, does not come close to 0, and the smoke test is told so.
    """

    name: ClassVar[str] = "denoise"
    metric = "psnr"
    epochs: ClassVar[int] = 40
    loss_floor: ClassVar[float | None] = 0.5
    # A code of half as many numbers as there are pixels.
    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 0.003,
        "weight_decay": 0.01,
        "batch_size": 32,
        "ema_decay": None,
        "width": 256,
        "code": 32,
    }

    def suggest(self, trial: TrialProtocol) -> TrainConfig:
        """An autoencoder: how wide, how narrow in its middle, and how it is trained."""
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
        """Images [n, 1, 8, 8] with noise, and the same without: pixels 0 to 16."""
        from sklearn.datasets import load_digits

        clean = load_digits().images[:, None]
        noisy = clean + np.random.default_rng(seed).normal(0, NOISE, clean.shape)
        return Splits.make(noisy, clean, seed=seed)

    def model(self, config: TrainConfig, train: Dataset) -> nn.Module:
        """[n, 1, 8, 8] raw pixels with noise -> [n, 1, 8, 8] pixels without."""
        settings = {**self.default_config().model, **config.model}
        return nn.Sequential(Standardize.fit(train.x, dim=(0, 2, 3)), Autoencoder(**settings))

    def step(self, model: nn.Module, batch: Batch, config: TrainConfig) -> Step:  # noqa: ARG002 part of the protocol
        """The squared error of the pixels, and the ratio that it is of the brightest one."""
        noisy = batch.y + NOISE * torch.randn_like(batch.y) if model.training else batch.x
        error = (model(noisy) - batch.y).square().flatten(1).mean(dim=1)
        return Step(error, metrics={"psnr": 10 * torch.log10(WHITE**2 / error.detach()).mean()})


class Autoencoder(nn.Module):
    """[n, 1, 8, 8] -> [n, 1, 8, 8] pixels 0 to 16, through a code of few numbers."""

    def __init__(self, width: int, code: int) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, code))
        self.decode = nn.Sequential(nn.Linear(code, width), nn.ReLU(), nn.Linear(width, 64))

    def forward(self, x: Tensor) -> Tensor:
        """Pixels."""
        decoded: Tensor = self.decode(self.encode(x))
        return WHITE * decoded.sigmoid().reshape(-1, 1, 8, 8)
