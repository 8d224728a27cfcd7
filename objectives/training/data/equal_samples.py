"""The probability that two samples are equal by chance, as in data of a few codes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch

from hpsearch.objectives.training.data.dataset import Dataset
from hpsearch.objectives.training.data.tree import index_rows, tensors

_UNSEEN_PAIRS = 3  # upper limit (95 %) of the mean of a Poisson distribution of which 0 was observed
_DEVIATIONS = 2.0  # standard deviations from the observed number of equal pairs to the bound
_MAX_SAMPLES = 128  # compared samples
_MAX_FEATURES = 4096  # of a sample; with more, evenly spaced ones are compared
_MIN_DISTINCT = 0.9  # share of the samples that have different values in a feature
_MIN_DIFFERENT = 8  # samples; fewer are those of a few codes
_MIN_SIMILAR_PAIRS = 3  # fewer are an accident


def bound_probability_of_equal_samples(train: Dataset, digests: Iterable[list[bytes]]) -> float:
    """Return an upper bound of the probability that two samples are equal; 0 if equal samples must be copies.

    Args:
        train: training samples.
        digests: digests of the inputs of each split, whose equal samples are chance.
    """
    if not _can_be_equal(train):
        return 0.0
    parts = list(digests)
    equal = sum(math.comb(count, 2) for part in parts for count in Counter(part).values())
    pairs = sum(math.comb(len(part), 2) for part in parts)
    return (equal + _DEVIATIONS * math.sqrt(equal) + _UNSEEN_PAIRS) / max(pairs, 1)


def _can_be_equal(train: Dataset) -> bool:
    """Return whether samples can be equal by chance: then many more pairs of different samples are similar.

    Similar pairs agree in half of their features, without features in which both have the most frequent value, such as
    the background of an image. If a feature differs between almost all samples, no samples are equal by chance.
    """
    if not train.in_memory:
        return True
    rows = torch.from_numpy(np.random.default_rng(0).permutation(len(train))[:_MAX_SAMPLES].copy())
    parts = [tensor.detach().cpu().reshape(len(rows), -1) for _, tensor in tensors(index_rows(train.x, rows))]
    stride = -(-sum(part.shape[1] for part in parts) // _MAX_FEATURES)
    values = torch.unique(torch.cat([part[:, ::stride].double() for part in parts], dim=1), dim=0)
    if len(values) < _MIN_DIFFERENT:
        return True
    if values.shape[1] == 1:  # distinct values of one feature, such as numbers of users, have no similar pairs
        return len(values) < _MIN_DISTINCT * len(rows)
    if any(len(torch.unique(column)) >= _MIN_DISTINCT * len(values) for column in values.T):
        return False
    is_rare = values != values.mode(dim=0).values
    similar = 0
    for row in range(len(values) - 1):
        compared = is_rare[row] | is_rare[row + 1 :]
        agreeing = (values[row] == values[row + 1 :]) & compared
        similar += int((2 * agreeing.sum(1) >= compared.sum(1)).sum())
    return similar >= _MIN_SIMILAR_PAIRS
