"""Split indices by chance, by class, by group or by time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.reproducibility.seeds import derive_seed

Rows = np.ndarray[Any, Any]


def divide(rows: Rows, share: float, labels: Any, groups: Any, seed: int) -> tuple[Rows, Rows]:
    """Draw a share of the rows [m], or of their groups, and return the remaining rows and the drawn ones.

    Args:
        rows: numbers of samples [m].
        share: in (0, 1).
        labels: classes of all samples, for a stratified draw; or None.
        groups: groups of all samples, none of which is divided; or None.
        seed: of the draw.

    Raises:
        ObjectiveError: a part would be empty, or a class is too rare.
    """
    from sklearn.model_selection import GroupShuffleSplit, train_test_split

    try:
        if groups is not None:
            splitter = GroupShuffleSplit(n_splits=1, test_size=share, random_state=seed)
            kept, taken = next(splitter.split(rows, groups=groups[rows]))
            return rows[kept], rows[taken]
        stratify = None if labels is None else labels[rows]
        kept, taken = train_test_split(rows, test_size=share, random_state=seed, stratify=stratify)
    except ValueError as error:
        raise ObjectiveError(f"the data cannot be split: {error}") from error
    return kept, taken


def by_time(times: Any, samples: int, val: float, test: float, *, earlier: float = 0.0) -> tuple[Rows, Rows, Rows]:
    """Return the rows of the earliest, the next and the latest samples; no moment is in two parts.

    `val`, `test` and `earlier` are shares of the samples. `earlier` moves the middle part back, which leaves a gap
    before the last part: a rolling origin (Tashman 2000, *International Journal of Forecasting* 16).

    Raises:
        ObjectiveError: a time is missing, or there are too few moments for three parts.
    """
    moments = np.asarray(times)
    if moments.shape != (samples,):
        raise ObjectiveError(f"times must be one value for each of the {samples} samples, not {list(moments.shape)}")
    if moments.dtype.kind not in "iufMm" or bool(np.isnan(moments).any()):
        raise ObjectiveError("times must be numbers or datetimes, none of them missing")
    order = np.argsort(moments, kind="stable")
    ordered = moments[order]
    cuts = []
    for share in (1 - val - test - earlier, 1 - test - earlier, 1 - test):
        first_later = ordered[min(round(share * samples), samples - 1)]
        cuts.append(int(np.searchsorted(ordered, first_later, side="left")))  # the whole moment is later
    train, valid, _, held = np.split(order, cuts)
    if min(len(train), len(valid), len(held)) == 0:
        raise ObjectiveError(
            f"the data cannot be split by time: {len(np.unique(moments))} moments, and each split needs its own"
        )
    return train, valid, held


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
    """Make `Splits.make` draw train and validation by `division`, with an unchanged test split.

    With "all" the training split has all samples but the test split, including the validation samples of the study.
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
    """Return two halves of the validation samples as positions [n / 2]; None if there are too few samples.

    Ordered blocks give the earlier and the later half, other blocks stay whole, and without blocks the halves are
    stratified by `labels` [n].
    """
    rows = np.arange(samples)
    numbers = None if blocks is None else blocks.numbers
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
