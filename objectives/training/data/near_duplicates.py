"""Near duplicates between two datasets: samples that differ from another sample much less than samples usually do."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpsearch.objectives.training.data.dataset import Dataset
from hpsearch.objectives.training.data.tree import index_rows, tensors

_MAX_PROBES = 256  # compared samples
_NEIGHBORS = 32  # a larger group of near duplicates is not found
_MIN_ROWS = 40  # fewer samples have too few neighbors for an estimate of their dimension
_MAX_FEATURES = 4096  # of a sample; with more, evenly spaced ones are compared
_CHUNK_VALUES = 2**24  # values that are converted to float32 at a time
_MIN_JUMP = 2.0
_NATURAL_SHARE = 1e-3  # of independent samples, whose distances jump by chance
_RESOLUTION = 1e-3  # smallest distance, relative to the norm of a sample, that float32 products can resolve


class NearDuplicates(NamedTuple):
    """Number of compared samples, and how many of them have a near duplicate in the other dataset."""

    found: int
    compared: int


def count_near_duplicates(part: Dataset, other: Dataset, part_rows: list[int], other_rows: list[int]) -> NearDuplicates:
    """Compare up to 256 samples of `part` with all samples of `other`, by Euclidean distance.

    A sample has near duplicates if the distances to its nearest neighbors jump: at most 31 neighbors are close, and the
    next is several times farther away. In data of dimension m, the ratio of consecutive distances r(k + 1) / r(k) of
    independent samples exceeds t with probability t^(-k m) (Facco et al. 2017, *Scientific Reports* 7). The distances
    to farther neighbors give m (Levina and Bickel 2004), and m gives the t that independent samples rarely exceed. So
    neither the scale nor the density of the data matters, and images of few classes or points on a curve are no
    duplicates.

    Features are standardized, unless a sample has several dimensions with equal units, such as an image.

    Args:
        part: samples that are compared.
        other: samples among which the neighbors are searched.
        part_rows: rows of `part` to choose from, without exact duplicates in `other`.
        other_rows: rows of `other`, each different sample once.
    """
    neighbors = min(_NEIGHBORS + 1, len(other_rows) // 4)
    if len(other_rows) < _MIN_ROWS or not part_rows:
        return NearDuplicates(0, 0)
    rng = np.random.default_rng(0)
    rows = torch.from_numpy(rng.permutation(part_rows)[:_MAX_PROBES].copy())
    reference = torch.from_numpy(rng.permutation(other_rows).copy())
    near = _find_neighbor_distances(_flatten(part, rows), other, reference, neighbors)
    jumps = (near[:, 1:] / near[:, :-1]).amax(dim=1)
    return NearDuplicates(int((jumps > _find_jump(near)).sum()), len(rows))


def _find_jump(near: Tensor) -> float:
    """Return the ratio of consecutive distances [n, k] that independent samples exceed with `_NATURAL_SHARE`."""
    count = near.shape[1]
    half = count // 2
    growth = float((near[:, -1] / near[:, half - 1]).log().median())
    if growth <= 0:
        return math.inf  # all distances are equal
    dimension = sum(1 / k for k in range(half, count)) / growth
    return max(_MIN_JUMP, math.exp(math.log1p(1 / _NATURAL_SHARE) / dimension))


def _find_neighbor_distances(probes: Tensor, other: Dataset, rows: Tensor, neighbors: int) -> Tensor:
    """Return the distances [n, neighbors] of the samples `probes` [n, features] to their neighbors, ascending."""
    sample = _flatten(other, rows[:1024])
    center, scale = sample.mean(0), sample.std(0)
    if all(tensor.ndim > 2 for _, tensor in tensors(other.x)):
        scale = torch.where(scale > 0, scale.mean(), 0)
    used = scale > 0
    center, scale = center[used], scale[used]
    probes = (probes[:, used] - center) / scale
    nearest, size = torch.empty(len(probes), 0), max(_CHUNK_VALUES // max(sample.shape[1], 1), 1)
    for chunk in torch.split(rows, size):
        found = torch.cdist(probes, (_flatten(other, chunk)[:, used] - center) / scale)
        both = torch.cat([nearest, found], dim=1)
        nearest = both.topk(min(neighbors, both.shape[1]), largest=False).values
    return torch.maximum(nearest, _RESOLUTION * probes.norm(dim=1, keepdim=True).clamp(min=1e-12))


def _flatten(data: Dataset, rows: Tensor) -> Tensor:
    """Return the inputs at `rows` as float32 [n, features]."""
    parts = [tensor.detach().cpu().reshape(len(rows), -1) for _, tensor in tensors(index_rows(data.x, rows))]
    features = sum(part.shape[1] for part in parts)
    stride = -(-features // _MAX_FEATURES)
    return torch.cat([part[:, ::stride].float() for part in parts], dim=1)
