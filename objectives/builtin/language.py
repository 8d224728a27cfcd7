"""A character language model of 0.37 million characters of Python's documentation."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpsearch.objectives.objective import Objective
from hpsearch.objectives.training.config import TrainConfig
from hpsearch.objectives.training.data.dataset import Batch, Dataset
from hpsearch.objectives.training.data.splits import Splits
from hpsearch.objectives.training.evaluation.step import Step

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpsearch.objectives.search_space import TrialProtocol

ALPHABET = 128  # ASCII; the last code represents all other characters
SAMPLE_LENGTH = 64  # characters of a sample


class Language(Objective):
    """Prediction of the next character in the texts of Python's `help()`; the metric is bits per character.

    The texts are those of `pydoc_data.topics` and depend on the version of Python. Repeated paragraphs are removed, so
    that no validation text is in the training split. Then the text is split into three contiguous parts, 60/20/20. Each
    sample starts without context.
    """

    name: ClassVar[str] = "language"
    metric = "bits_per_character"
    direction = "minimize"
    epochs: ClassVar[int] = 8
    loss_floor: ClassVar[float | None] = 0.1  # nats: the start of a sample cannot be predicted
    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 0.02,
        "weight_decay": 0.01,
        "batch_size": 32,
        "schedule": "cosine",
        "layers": 1,
        "width": 96,
        "dropout": 0.0,
    }

    def suggest(self, trial: TrialProtocol) -> TrainConfig:
        """Suggest an LSTM and the training settings."""
        return TrainConfig(
            lr=trial.suggest_float("lr", 1e-3, 3e-2, log=True),
            weight_decay=trial.suggest_float("weight_decay", 1e-4, 1e-1, log=True),
            batch_size=trial.suggest_categorical("batch_size", [16, 32, 64]),
            schedule=trial.suggest_categorical("schedule", ["cosine", "one_cycle"]),
            model={
                "layers": trial.suggest_int("layers", 1, 2),
                "width": trial.suggest_int("width", 32, 128, step=32),
                "dropout": trial.suggest_float("dropout", 0.0, 0.3),
            },
        )

    def data(self, seed: int) -> Splits:
        """Return character codes [n, 64] and next-character codes [n, 64], split by position; `seed` has no effect."""
        codes = torch.tensor([min(ord(character), ALPHABET - 1) for character in load_corpus()])
        samples = codes[: len(codes) // (SAMPLE_LENGTH + 1) * (SAMPLE_LENGTH + 1)].reshape(-1, SAMPLE_LENGTH + 1)
        return Splits.make(samples[:, :-1], samples[:, 1:], seed=seed, times=range(len(samples)))

    def model(self, config: TrainConfig, train: Dataset) -> nn.Module:  # noqa: ARG002 no statistics to fit
        """Return a network from character codes [n, 64], 0 to 127, to logits of the next characters [n, 64, 128]."""
        return Recurrent(**{**self.default_config().model, **config.model})

    def step(self, model: nn.Module, batch: Batch, config: TrainConfig) -> Step:  # noqa: ARG002 part of the protocol
        """Return the mean cross entropy per character, in nats as the loss and in bits as the metric."""
        loss = functional.cross_entropy(model(batch.x).flatten(0, 1), batch.y.flatten())
        return Step(loss, metrics={"bits_per_character": loss.detach() / math.log(2)})


def load_corpus() -> str:
    """Return the text of all topics in alphabetical order, without repeated paragraphs."""
    from pydoc_data.topics import topics

    first: dict[str, str] = {}
    for topic in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[topic]):
            first.setdefault(" ".join(paragraph.split()), paragraph)
    return "\n\n".join(first.values())


class Recurrent(nn.Module):
    """LSTM (Hochreiter and Schmidhuber 1997) that predicts the next character."""

    def __init__(self, layers: int, width: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(ALPHABET, width)
        self.units = nn.LSTM(width, width, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0)
        self.last = nn.Sequential(nn.Dropout(dropout), nn.Linear(width, ALPHABET))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the next characters [n, 64, 128]."""
        logits: Tensor = self.last(self.units(self.embed(x))[0])
        return logits
