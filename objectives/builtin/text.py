"""About a thousand paragraphs of Python's documentation on eight topics, classified by a small transformer."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any, ClassVar
from zlib import crc32

import torch
from torch import Tensor, nn

from hpsearch.objectives.objective import Objective
from hpsearch.objectives.training.config import TrainConfig
from hpsearch.objectives.training.data.dataset import Dataset
from hpsearch.objectives.training.data.samplers import LengthGroupedSampler
from hpsearch.objectives.training.data.samples import pad_collate
from hpsearch.objectives.training.data.splits import Splits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpsearch.objectives.search_space import TrialProtocol

TOPICS = (
    *("compound", "specialnames", "types", "debugger"),
    *("string-methods", "typesseq", "typesmapping", "formatstrings"),
)
VOCABULARY = 4096  # number of word ids; 0 is padding
SHORTEST, LONGEST = 8, 64  # words of a paragraph; shorter paragraphs are omitted, longer paragraphs are cut


class Text(Objective):
    """Classification of paragraphs by their topic: eight topics of `pydoc_data.topics`, the texts of Python's `help()`.

    The split is random and stratified, 60/20/20. A paragraph that a topic repeats is one sample, and a paragraph that
    occurs in several topics is omitted, so no text is in two splits. The text depends on the version of Python.
    """

    name: ClassVar[str] = "text"
    metric = "accuracy"
    epochs: ClassVar[int] = 15
    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 0.005,
        "weight_decay": 0.1,
        "batch_size": 32,
        "label_smoothing": 0.1,
        "layers": 1,
        "width": 64,
        "heads": 4,
        "dropout": 0.3,
    }

    def suggest(self, trial: TrialProtocol) -> TrainConfig:
        """Suggest a transformer encoder (with 0 layers: a bag of words) and the training settings."""
        return TrainConfig(
            lr=trial.suggest_float("lr", 3e-4, 3e-2, log=True),
            weight_decay=trial.suggest_float("weight_decay", 1e-3, 1.0, log=True),
            batch_size=trial.suggest_categorical("batch_size", [16, 32, 64]),
            label_smoothing=trial.suggest_float("label_smoothing", 0.0, 0.2),
            model={
                "layers": trial.suggest_int("layers", 0, 2),
                "width": trial.suggest_int("width", 32, 128, step=32),
                "heads": trial.suggest_categorical("heads", [2, 4]),
                "dropout": trial.suggest_float("dropout", 0.0, 0.5),
            },
        )

    def data(self, seed: int) -> Splits:
        """Return the 8 to 64 word ids [t] of each paragraph, and the index of its topic in `TOPICS`."""
        found = load_paragraphs()
        ids = [[hash_word(word) for word in text] for text in found]
        return Splits.make(ids, list(found.values()), seed=seed, collate=pad_collate)

    def sampler(self, config: TrainConfig, train: Dataset) -> LengthGroupedSampler:
        """Batch paragraphs of similar length."""
        return LengthGroupedSampler([len(ids) for ids, _ in train.samples or ()], config.batch_size)

    def model(self, config: TrainConfig, train: Dataset) -> nn.Module:  # noqa: ARG002 no statistics to fit
        """Return a network from word ids [n, longest] and lengths [n] to logits [n, 8]."""
        return Encoder(**{**self.default_config().model, **config.model})


def load_paragraphs() -> dict[tuple[str, ...], int]:
    """Return the lower-case words of each paragraph that occurs in only one topic, with its index in `TOPICS`."""
    from pydoc_data.topics import topics

    owners: defaultdict[tuple[str, ...], set[int]] = defaultdict(set)
    for number, topic in enumerate(TOPICS):
        for paragraph in re.split(r"\n\s*\n", topics[topic]):
            owners[tuple(re.findall(r"\w+", paragraph.lower())[:LONGEST])].add(number)
    return {words: min(topic) for words, topic in owners.items() if len(topic) == 1 and len(words) >= SHORTEST}


def hash_word(word: str) -> int:
    """Return a word's id, a hash from 1 to 4,095, so that no vocabulary must be fitted (Weinberger et al. 2009)."""
    return 1 + crc32(word.encode()) % (VOCABULARY - 1)


class Encoder(nn.Module):
    """Pre-norm transformer encoder (Vaswani et al. 2017) of word ids, with a linear classifier of its mean output."""

    def __init__(self, layers: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.word = nn.Embedding(VOCABULARY, width, padding_idx=0)
        self.place = nn.Parameter(0.02 * torch.randn(LONGEST, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 2 * width, dropout, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(width, len(TOPICS))

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Return logits [n, 8]. Padding is masked in the attention and excluded from the mean."""
        within = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        x = self.drop(self.word(ids) + self.place[: ids.shape[1]])
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=~within)
        mean = (x * within[:, :, None]).sum(dim=1) / lengths[:, None]
        logits: Tensor = self.last(self.drop(mean))
        return logits
