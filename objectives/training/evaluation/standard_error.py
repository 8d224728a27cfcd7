"""Standard error of a metric, from random halves of the samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.data.split_rows import Rows

PAIRS = 8  # of halves; with 4 runs, this number gives a standard error with a relative error of 13 %
_MIN_BLOCKS = 4  # minimum number of samples or groups for a standard error


def estimate_error(
    value: Callable[[Tensor], float], samples: int, blocks: Rows | None, seed: int, strata: Rows | None = None
) -> float | None:
    """Return the standard error of a value from random halves of the samples; None if undefined.

    The samples are divided into two halves several times (half-sample replication, McCarthy 1969, *Review of the
    International Statistical Institute* 37). The values of the two halves have no sample in common. Each has about
    twice the variance of the value of all samples, so their difference has about four times this variance.

    A bootstrap draws some samples twice: a copy would be the nearest neighbor of its sample in metrics such as
    recall@k. The delete-d jackknife compares values of overlapping samples. Its variance is too large for such metrics
    and for distances of distributions, most with a small d.

    Args:
        value: function that computes the value from the samples at some positions. Pairs of halves for which it raises
            an error are skipped, for example if a half has a single class.
        samples: number of samples.
        blocks: group number of each sample [n]; groups stay together. None treats samples as independent.
        seed: seed of the halves.
        strata: category of each sample [n] whose proportions new data have too, as in a stratified split; the halves
            keep these proportions. None for no categories. Ignored with blocks.
    """
    rng = np.random.default_rng(seed)
    numbers = np.arange(samples) if blocks is None else np.unique(blocks, return_inverse=True)[1]
    n_blocks = int(numbers.max()) + 1
    if n_blocks < _MIN_BLOCKS:
        return None
    found = []
    for _ in range(PAIRS):
        order = rng.permutation(n_blocks)
        if strata is not None and blocks is None:
            order = order[np.argsort(strata[order], kind="stable")]
        is_first = np.isin(numbers, order[::2])
        try:
            first, second = (value(torch.from_numpy(np.flatnonzero(half))) for half in (is_first, ~is_first))
        except (ObjectiveError, ValueError, RuntimeError, KeyError):  # a half lacks data that the metric needs
            continue
        found.append((first - second) ** 2)
    finite = [square for square in found if math.isfinite(square)]
    if len(finite) < PAIRS / 2:
        return None
    first_half = n_blocks - n_blocks // 2
    return math.sqrt(statistics.fmean(finite) * first_half * (n_blocks // 2)) / n_blocks
