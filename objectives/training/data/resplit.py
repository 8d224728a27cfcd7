"""New splits of a study's training and validation samples: for the runs of finalists, and merged for a refit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.data.folds import Fold, draw_fold, draw_fold_by_time
from hpsearch.objectives.training.data.split_rows import Rows, draw_split
from hpsearch.objectives.training.reproducibility.seeds import derive_seed

# The seed of a new split into training and validation; "all" to train on both (a refit); None for the study's split.
ResplitSeed = int | Literal["all"] | None

_MAX_VAL_SHARE = 0.5  # maximum share of the study's training samples that a new split uses for validation
_SIZE_TOLERANCE = 0.05  # relative difference of split sizes; smaller differences are ignored


@dataclass
class SplitRequest:
    """Request to `Splits.make` for a new split.

    Attributes:
        resplit_seed: the split.
        fold: fold of training and validation samples; None to split them as `Splits.make` does otherwise.
        fold_seed: seed of the division into folds.
        has_merged: whether `Splits.make` merged training and validation samples.
        has_divided: whether `Splits.make` divided training and validation samples into folds.
    """

    resplit_seed: ResplitSeed
    fold: Fold | None = None
    fold_seed: int = 0
    has_merged: bool = False
    has_divided: bool = False


_SPLIT_REQUEST: ContextVar[SplitRequest | None] = ContextVar("split request", default=None)


@contextmanager
def request_split(resplit_seed: ResplitSeed, fold: Fold | None = None, fold_seed: int = 0) -> Iterator[SplitRequest]:
    """Return a context in which `Splits.make` splits training and validation samples by `resplit_seed`.

    The test split does not change. With "all", the training split also contains the validation samples. With None, the
    split is that of the study. With a fold, the samples of both are divided into folds by `fold_seed`.
    """
    request = SplitRequest(resplit_seed, fold, fold_seed)
    token = _SPLIT_REQUEST.set(request)
    try:
        yield request
    finally:
        _SPLIT_REQUEST.reset(token)


def _get_requested_split_seed() -> int | None:
    """Return the seed of the requested split; None for the study's split."""
    request = _SPLIT_REQUEST.get()
    return request.resplit_seed if request is not None and isinstance(request.resplit_seed, int) else None


def resplit_if_requested(
    train: Rows, valid: Rows, share: float, labels: Rows | None, groups: Rows | None
) -> tuple[Rows, Rows]:
    """Return training and validation rows of the requested new split; the study's if none is requested or possible.

    Args:
        train: the study's training rows.
        valid: the study's validation rows.
        share: number of validation rows by number of training rows.
        labels: classes of all samples, for a stratified split; None for a split without stratification.
        groups: groups of all samples, which the split does not divide; None if the samples have no groups.
    """
    if (request := _SPLIT_REQUEST.get()) is not None and request.fold is not None:
        request.has_divided = True
        return draw_fold(np.concatenate([train, valid]), labels, groups, request.fold, request.fold_seed)
    if (resplit_seed := _get_requested_split_seed()) is None:
        return train, valid
    for strata in (labels, None):
        with suppress(ObjectiveError):  # a class or a group is too rare for another split
            return _resplit_rows(train, valid, min(share, _MAX_VAL_SHARE), strata, groups, resplit_seed)
    return train, valid


def _resplit_rows(
    train: Rows, valid: Rows, share: float, labels: Rows | None, groups: Rows | None, resplit_seed: int
) -> tuple[Rows, Rows]:
    """Return training and validation rows of a new split, with as many training rows as in the study.

    The new validation rows come from the study's training rows. The study's validation rows become training rows: the
    configuration was selected on them, so they would overstate its score.
    """
    kept, new_valid = draw_split(train, share, labels, groups, resplit_seed)
    if len(new_valid) < len(valid) * (1 - _SIZE_TOLERANCE):
        with suppress(ObjectiveError):  # too few samples to split
            _, valid = draw_split(valid, len(new_valid) / len(valid), None, groups, resplit_seed)
    return np.concatenate([kept, valid]), new_valid


def select_training_rows(train: Rows, val: Rows) -> Rows:
    """Return the rows to train on: the training rows, and in a refit also the validation rows."""
    request = _SPLIT_REQUEST.get()
    if request is None or request.resplit_seed != "all":
        return train
    request.has_merged = True
    return np.sort(np.concatenate([train, val]))


def divide_by_time_if_requested(train: Rows, valid: Rows, times: Any) -> tuple[Rows, Rows]:
    """Return training and validation rows of the requested fold by time; the given rows if no fold is requested."""
    if (request := _SPLIT_REQUEST.get()) is None or request.fold is None:
        return train, valid
    request.has_divided = True
    return draw_fold_by_time(np.concatenate([train, valid]), times, request.fold)


def compute_val_window_shift(val: float, test: float) -> float:
    """Return the shift by which a new split by time moves the validation window back, as a share of the samples.

    The shift is random, from half of the window's length to its full length: the configuration was selected on the
    study's window, so the new window must differ from it. The shift is smaller if less than half of the training
    samples would remain.
    """
    request = _SPLIT_REQUEST.get()
    if (resplit_seed := _get_requested_split_seed()) is None or (request is not None and request.fold is not None):
        return 0.0
    return (1 + derive_seed(resplit_seed, "origin") / 2**32) / 2 * min(val, (1 - val - test) / 2)
