"""Divide the training and validation samples of a study into folds, for k-fold cross-validation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.data.split_rows import Rows
from hpsearch.objectives.training.reproducibility.seeds import derive_seed


@dataclass(frozen=True)
class Fold:
    """One fold of a division: its number, from 0, and the number of folds."""

    index: int
    count: int


def draw_fold(rows: Rows, labels: Rows | None, groups: Rows | None, fold: Fold, seed: int) -> tuple[Rows, Rows]:
    """Return the training and validation rows of a fold. Each row is a validation row of exactly one fold.

    Args:
        rows: rows to divide [m].
        labels: classes of all samples, whose proportions each fold keeps; None for folds without stratification.
        groups: groups of all samples, which no fold divides; None if the samples have no groups.
        fold: the fold.
        seed: seed of the division.

    Raises:
        ObjectiveError: there are fewer groups than folds, or fewer samples of a class or in all.
    """
    from sklearn.model_selection import GroupKFold, KFold, StratifiedKFold

    rows, options = np.sort(rows), {"n_splits": fold.count, "shuffle": True, "random_state": derive_seed(seed, "folds")}
    smallest, what, parts = len(rows), "samples", KFold(**options).split(rows)
    if groups is not None:
        smallest, what = len(np.unique(groups[rows])), "groups"
        parts = GroupKFold(**options).split(rows, groups=groups[rows])
    elif labels is not None:
        smallest, what = int(np.unique(labels[rows], return_counts=True)[1].min()), "samples of the rarest class"
        parts = StratifiedKFold(**options).split(rows, labels[rows])
    if smallest < fold.count:
        fault = f"--folds {fold.count} needs at least {fold.count} {what}, but there are {smallest}"
        raise ObjectiveError(fault if what.endswith("class") else f"{fault}; use fewer folds")
    train, val = list(parts)[fold.index]
    return rows[train], rows[val]


def draw_fold_by_time(rows: Rows, times: Any, fold: Fold) -> tuple[Rows, Rows]:
    """Return the training and validation rows of a fold by time: a window, and all rows before it.

    The windows follow each other, and the first begins after half of the times at the latest: a rolling origin
    (Tashman 2000, *International Journal of Forecasting* 16).

    Args:
        rows: rows to divide [m], ordered by time.
        times: times of all samples.
        fold: the fold; the last fold has the latest window.

    Raises:
        ObjectiveError: there are fewer than two distinct times per fold.
    """
    from sklearn.model_selection import TimeSeriesSplit

    moments, number = np.unique(np.asarray(times)[rows], return_inverse=True)
    if len(moments) < 2 * fold.count:
        raise ObjectiveError(f"{fold.count} folds by time need {2 * fold.count} distinct times, not {len(moments)}")
    windows = TimeSeriesSplit(fold.count, test_size=len(moments) // (2 * fold.count)).split(moments)
    train, val = list(windows)[fold.index]
    return rows[np.isin(number, train)], rows[np.isin(number, val)]
