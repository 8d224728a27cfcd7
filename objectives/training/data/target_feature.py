"""Targets among the inputs: a feature that predicts the target almost perfectly, or targets of other samples."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from hpsearch.objectives.training.data.dataset import Dataset
from hpsearch.objectives.training.data.split_rows import Rows
from hpsearch.objectives.training.data.tree import tensors

_MAX_FEATURES = 10_000  # of a sample; data with more are images or signals, in which no entry is a label
_MAX_SAMPLES = 1000  # compared samples
_MIN_SAMPLES = 8  # with fewer samples, a feature can determine the target by chance
_MIN_MINORITY = 5  # samples outside the largest class, likewise
_MIN_MINORITY_OF_RANGES = 20  # likewise, for ranges of values: those of a good feature may be separate by chance
_MAX_ERRORS = 0.01  # of the samples outside the largest class
_RANK_CORRELATION = 1 - 1e-5  # absolute value from which a feature is a copy of a numeric target
_MIN_DISTINCT = 0.9  # share of distinct targets; rounded targets are equal to other values by chance
_MAX_VALUES = 1_000_000  # compared input values; the more values, the more are equal in float32 by chance


def find_target_feature(train: Dataset) -> str | None:
    """Return a description of a feature that predicts the target almost perfectly; None if there is none.

    Class labels: the feature's values are divided into one range per class, or in any way if there are at most as many
    values as classes. At most 1 % of the samples outside the largest class are wrong.
    Numeric targets: the rank correlation is above 0.99999, so that the feature is a monotone function of the target.
    """
    y = train.y
    if not train.in_memory or not isinstance(y, Tensor) or len(y) < _MIN_SAMPLES:
        return None
    rows = torch.from_numpy(np.random.default_rng(0).permutation(len(y))[:_MAX_SAMPLES].copy())
    target = y[rows].reshape(len(rows), -1).cpu()
    if target.shape[1] != 1:
        return None
    values = target[:, 0].numpy()
    is_copy = _is_copy_of_number if y.dtype.is_floating_point else _predicts_class
    if len(np.unique(values)) < 2:
        return None
    return next((name for name, column in _iterate_features(train, rows) if is_copy(column, values)), None)


def count_targets_in_inputs(part: Dataset, train: Dataset) -> int:
    """Return the number of targets of `part` that are values in the inputs of `train`, as in windows of a time series.

    The result is 0 unless the targets are numbers of which almost all differ.
    """
    y = part.y
    if not (part.in_memory and train.in_memory) or not isinstance(y, Tensor) or not y.dtype.is_floating_point:
        return 0
    found = [tensor for _, tensor in tensors(train.x) if tensor.dtype == y.dtype]
    values = sum(tensor[0].numel() for tensor in found)
    if y.numel() != len(y) or len(torch.unique(y)) < _MIN_DISTINCT * len(y) or not 0 < values <= _MAX_FEATURES:
        return 0
    rows = torch.from_numpy(np.random.default_rng(0).permutation(len(train))[: _MAX_VALUES // values].copy())
    inputs = torch.cat([tensor[rows].flatten() for tensor in found])
    return int(torch.isin(y.flatten(), inputs).sum())


def _iterate_features(train: Dataset, rows: Tensor) -> Iterator[tuple[str, Rows]]:
    """Iterate over the features of inputs [n] or [n, features], with their names."""
    found = [(name, tensor) for name, tensor in tensors(train.x) if tensor.ndim <= 2]
    if sum(tensor[0].numel() for _, tensor in found) > _MAX_FEATURES:
        return
    for name, tensor in found:
        of = f"the inputs {name!r}" if name else "the inputs"
        columns = tensor[rows].detach().cpu().reshape(len(rows), -1).numpy()
        for index in range(columns.shape[1]):
            yield f"feature {index} of {of}", columns[:, index]


def _predicts_class(column: Rows, labels: Rows) -> bool:
    classes, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    minority = len(labels) - int(counts.max())
    errors_allowed = int(_MAX_ERRORS * minority) if minority >= _MIN_MINORITY else 0
    changes_allowed = len(classes) - 1 + 2 * errors_allowed
    order = np.lexsort((codes, column))
    column, codes = column[order], codes[order]
    if np.count_nonzero(np.diff(codes)) > changes_allowed:
        return False  # as almost all features; the rest is slower
    starts = np.flatnonzero(np.append(True, np.diff(column) != 0))
    groups = np.split(codes, starts[1:])
    majority = np.array([np.bincount(group).argmax() for group in groups])
    errors = sum(int((group != code).sum()) for group, code in zip(groups, majority, strict=True))
    if errors > errors_allowed or len(np.unique(majority)) < len(classes):
        return False
    has_value_per_class = len(groups) == len(classes)
    changes = int(np.count_nonzero(np.diff(majority)))
    return has_value_per_class or (minority >= _MIN_MINORITY_OF_RANGES and changes <= changes_allowed - 2 * errors)


def _is_copy_of_number(column: Rows, target: Rows) -> bool:
    """Return whether the ranks of both are almost proportional, with equal ranks for equal values."""
    from scipy.stats import rankdata

    one, other = rankdata(column), rankdata(target)
    if np.ptp(one) == 0:
        return False
    return bool(abs(np.corrcoef(one, other)[0, 1]) > _RANK_CORRELATION)
