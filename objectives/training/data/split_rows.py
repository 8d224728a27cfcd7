"""Split sample indices at random, by class, by group or by time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.reproducibility.seeds import derive_seed

Rows = np.ndarray[Any, Any]


def draw_split(rows: Rows, share: float, labels: Any, groups: Any, seed: int) -> tuple[Rows, Rows]:
    """Draw a share of the rows [m], or of their groups, at random; return the remaining rows and the drawn rows.

    Args:
        rows: indices of samples [m].
        share: share to draw, in (0, 1).
        labels: classes of all samples, for a stratified split; None for a split without stratification.
        groups: groups of all samples, which the split does not divide; None if the samples have no groups.
        seed: seed of the random numbers.

    Raises:
        ObjectiveError: one of the two results would be empty, or a class is too rare.
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


def split_by_time(times: Any, samples: int, val: float, test: float, *, back: float = 0.0) -> tuple[Rows, Rows, Rows]:
    """Split rows by time: the earliest for training, the next for validation, the latest for the test.

    Samples of equal time are in the same split. `val`, `test` and `back` are shares of the samples. `back` moves the
    validation split back in time, which leaves a gap before the test split: a rolling origin (Tashman 2000,
    *International Journal of Forecasting* 16).

    Raises:
        ObjectiveError: a time is missing, or there are too few distinct times for three splits.
    """
    moments = np.asarray(times)
    if moments.shape != (samples,):
        raise ObjectiveError(f"times must have the shape [{samples}], one value per sample, not {list(moments.shape)}")
    if moments.dtype.kind not in "iufMm" or bool(np.isnan(moments).any()):
        raise ObjectiveError("times must be numbers or datetimes without missing values")
    order = np.argsort(moments, kind="stable")
    ordered = moments[order]
    cuts = []
    for share in (1 - val - test - back, 1 - test - back, 1 - test):
        first_later = ordered[min(round(share * samples), samples - 1)]
        cuts.append(int(np.searchsorted(ordered, first_later, side="left")))  # equal times belong to the later part
    train, valid, _, held = np.split(order, cuts)
    if min(len(train), len(valid), len(held)) == 0:
        raise ObjectiveError(
            f"the data cannot be split by time: {len(np.unique(moments))} distinct times are too few for three splits"
        )
    return train, valid, held


_MIN_SAMPLES = 2  # samples of a half, and of each class in a half if possible


@dataclass(frozen=True)
class Blocks:
    """Groups of validation samples that stay together when the samples are halved or resampled.

    Attributes:
        numbers: block number of each sample [n], for example one number per group or per time.
        ordered: whether blocks and samples are ordered by time.
    """

    numbers: Rows
    ordered: bool = False


def split_halves(labels: Rows | None, samples: int, blocks: Blocks | None, seed: int) -> tuple[Rows, Rows] | None:
    """Return two halves of the validation samples as positions [n / 2]; None if there are too few samples.

    Ordered blocks are split into the earlier and the later half. Other blocks are not divided. Without blocks, the
    halves are stratified by `labels` [n].
    """
    rows = np.arange(samples)
    numbers = None if blocks is None else blocks.numbers
    if samples < 2 * _MIN_SAMPLES or (numbers is not None and len(np.unique(numbers)) < 2):
        return None
    if numbers is not None and blocks is not None and blocks.ordered:
        cut = int(np.searchsorted(numbers, numbers[samples // 2], side="left"))
        cut = cut or int(np.searchsorted(numbers, numbers[0], side="right"))
        return rows[:cut], rows[cut:]
    if labels is not None and (numbers is not None or np.unique(labels, return_counts=True)[1].min() < _MIN_SAMPLES):
        labels = None  # a class with one sample is in one half only; a metric that needs it raises an error
    first, second = draw_split(rows, 0.5, labels, numbers, derive_seed(seed, "halves"))
    return np.sort(first), np.sort(second)
