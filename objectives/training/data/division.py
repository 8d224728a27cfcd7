"""Dividing anew what is not the test split: what a run is confirmed on, once a search has climbed on one division.

`Splits.make` asks here for the division that is wanted, so that whatever else `data()` does with what it gets - a
vocabulary, a filter, a scale - is done for that division too. A refit wants none: it is trained on all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hpsearch.objectives.training.data.split import Rows, divide
from hpsearch.objectives.training.reproducibility.seeds import derive_seed

# The seed of a division; of a refit all samples but the test split; or the study's own division.
Division = int | Literal["all"] | None

_LEAST = 2  # samples, of all or of a class, that a half is judged by, where it can be


@dataclass
class Wanted:
    """What is wanted of `Splits.make`, and whether it joined train and validation, as a refit wants it."""

    division: Division
    joined: bool = False


_WANTED: ContextVar[Wanted | None] = ContextVar("division", default=None)


@contextmanager
def divided_anew(division: Division) -> Iterator[Wanted]:
    """A region in which `Splits.make` draws train and validation by `division`, and the test split as ever.

    With "all" the training samples are all but the test split, and the validation samples, the study's, among them.
    """
    wish = Wanted(division)
    token = _WANTED.set(wish)
    try:
        yield wish
    finally:
        _WANTED.reset(token)


def wanted() -> int | None:
    """The seed of the division that is wanted; None for the study's own."""
    wish = _WANTED.get()
    return wish.division if wish is not None and isinstance(wish.division, int) else None


def trained_on(train: Rows, val: Rows) -> Rows:
    """The rows to train on: those of the training split, and in a refit the validation samples as well."""
    wish = _WANTED.get()
    if wish is None or wish.division != "all":
        return train
    wish.joined = True
    return np.sort(np.concatenate([train, val]))


def moved_back(division: int | None, val: float, test: float) -> float:
    """By which share of the samples the validation window of a division by time is moved back from the study's.

    By half of its length to all of it, for the study's window has chosen the configuration; and so that half of the
    training samples stay.
    """
    if division is None:
        return 0.0
    return (1 + derive_seed(division, "origin") / 2**32) / 2 * min(val, (1 - val - test) / 2)


@dataclass(frozen=True)
class Blocks:
    """What of the validation samples belongs together, and is neither halved nor resampled apart.

    Attributes:
        numbers: of the block of each sample [n]: its group, its moment.
        ordered: whether the blocks follow each other in time, and so do the samples.
    """

    numbers: Rows
    ordered: bool = False


def halved(labels: Rows | None, samples: int, blocks: Blocks | None, seed: int) -> tuple[Rows, Rows] | None:
    """Two halves of the validation samples, as positions [n / 2]; None where they are too few.

    By time the earlier and the later ones; whole blocks, where there are any; else the same shares of each class.

    Args:
        labels: classes [n], or None.
        samples: how many there are.
        blocks: of them, or None.
        seed: of the draw.
    """
    rows = np.arange(samples)
    numbers = None if blocks is None else blocks.numbers
    if numbers is not None and len(numbers) != samples:  # somebody took a part of them
        numbers = None
    if samples < 2 * _LEAST or (numbers is not None and len(np.unique(numbers)) < 2):
        return None
    if numbers is not None and blocks is not None and blocks.ordered:
        cut = int(np.searchsorted(numbers, numbers[samples // 2], side="left"))
        cut = cut or int(np.searchsorted(numbers, numbers[0], side="right"))
        return rows[:cut], rows[cut:]
    if labels is not None and (numbers is not None or np.unique(labels, return_counts=True)[1].min() < _LEAST):
        labels = None  # a class that has but one is in one of them alone; a metric that needs it says so
    first, second = divide(rows, 0.5, labels, numbers, derive_seed(seed, "halves"))
    return np.sort(first), np.sort(second)
