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

HALF_SAMPLES = 16  # with 4 runs, this number gives a standard error with a relative error of 9 %
_MIN_BLOCKS = 4  # minimum number of samples or groups for a standard error


def estimate_error(value: Callable[[Tensor], float], samples: int, blocks: Rows | None, seed: int) -> float | None:
    """Return the standard error of a value from random halves of the samples; None if undefined.

    This is the delete-half jackknife (Shao and Wu 1989, *Annals of Statistics* 17): the standard deviation of the
    values of random halves, without replacement, estimates the standard error of the value of all samples. Unlike a
    bootstrap, it draws no sample twice: a copy would be the nearest neighbor of its sample in metrics such as recall@k.

    Args:
        value: function that computes the value from the samples at some positions. Halves for which it raises an error
            are skipped, for example halves with a single class.
        samples: number of samples.
        blocks: group number of each sample [n]; groups stay together. None treats samples as independent.
        seed: seed of the halves.
    """
    rng = np.random.default_rng(seed)
    numbers = np.arange(samples) if blocks is None else np.unique(blocks, return_inverse=True)[1]
    n_blocks = int(numbers.max()) + 1
    if n_blocks < _MIN_BLOCKS:
        return None
    found = []
    for _ in range(HALF_SAMPLES):
        rows = np.flatnonzero(rng.permutation(n_blocks)[numbers] < n_blocks // 2)
        try:
            found.append(value(torch.from_numpy(rows)))
        except (ObjectiveError, ValueError, RuntimeError, KeyError):  # the half lacks data that the metric needs
            continue
    finite = [number for number in found if math.isfinite(number)]
    if len(finite) < HALF_SAMPLES / 2:
        return None
    return statistics.stdev(finite) * math.sqrt((n_blocks // 2) / (n_blocks - n_blocks // 2))
