"""Dividing samples between splits: at random, by groups, by time."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpsearch.objectives.errors import ObjectiveError

Rows = np.ndarray[Any, Any]


def divide(rows: Rows, share: float, labels: Any, groups: Any, seed: int) -> tuple[Rows, Rows]:
    """The rows without a share of them, and that share, drawn by `seed`.

    Args:
        rows: numbers of samples [m].
        share: of the rows, or of the groups, in (0, 1).
        labels: classes of all samples, whose shares are kept; or None.
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
    """Rows of the earliest, the next and the latest samples, in the order of time; no moment is in two of them.

    Args:
        times: of all samples [n].
        samples: how many there are.
        val, test: shares of the samples.
        earlier: by which share of the samples the middle part is moved back from the last, which stays: a rolling
            origin (Tashman 2000, *International Journal of Forecasting* 16). What is between them is in no part.

    Raises:
        ObjectiveError: a time is missing, or there are too few moments for three parts.
    """
    moments = np.asarray(times)
    if moments.shape != (samples,):
        raise ObjectiveError(f"times must be one value for each of the {samples} samples, not {list(moments.shape)}")
    if moments.dtype.kind not in "iufMm" or bool(_missing(moments).any()):
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


def _missing(moments: Rows) -> Rows:
    return np.isnat(moments) if moments.dtype.kind in "Mm" else np.isnan(moments)
