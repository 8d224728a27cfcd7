"""Signs in the content of splits that a validation or test score will be too good."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.data.dataset import Dataset
from hpsearch.objectives.training.data.splits import Splits
from hpsearch.objectives.training.data.tree import tensors

_MAX_FEATURES = 10_000  # of a sample; data with more are images or signals, in which no entry is a label
_MIN_SAMPLES = 8  # with fewer samples, a feature can determine the target by chance
_MIN_SHARE = 0.01  # of a split; fewer shared samples can be natural, and change the score little
_CORRELATION = 1 - 1e-6  # absolute value from which a feature is a copy of a numeric target

KINDS = ("shared_samples", "target_in_features")


def find_leaks(splits: Splits) -> dict[str, str]:
    """Return the signs of leakage in data that are in memory: a description by kind, one of `KINDS`.

    Raises:
        ObjectiveError: all samples of a split are in another split, so that its score is meaningless.
    """
    found = {}
    if shared := _describe_shared_samples(splits):
        found["shared_samples"] = shared
    if (feature := find_target_feature(splits.train)) is not None:
        found["target_in_features"] = f"feature {feature} of the inputs determines the target; remove it from x"
    return found


def count_shared_inputs(one: Dataset, other: Dataset) -> int:
    """Return the number of inputs of `other` that are also in `one`, bit for bit; 0 for data that are not in memory."""
    if not (one.in_memory and other.in_memory):
        return 0
    seen = set(_digest_inputs(one))
    return sum(digest in seen for digest in _digest_inputs(other))


def _describe_shared_samples(splits: Splits) -> str | None:
    """Return the numbers of shared samples of the pairs of splits; None if they are few.

    Samples with few features repeat naturally, also within a split.
    """
    parts = [(name, list(_digest_inputs(part))) for name, part in splits.parts() if part.in_memory]
    lines = []
    for (first, ours), (second, theirs) in itertools.combinations(parts, 2):
        counts = Counter(ours)
        shared = sum(digest in counts for digest in theirs)
        repeated = sum(count for count in counts.values() if count > 1) / len(ours)
        if shared <= len(theirs) * max(_MIN_SHARE, 2 * repeated):
            continue
        if shared == len(theirs):
            raise ObjectiveError(
                f"all {shared} {second} samples are also {first} samples, so their score is meaningless; "
                "split the data with Splits.make()"
            )
        lines.append(f"{shared} of {len(theirs)} {second} inputs are also {first} inputs")
    return f"{', '.join(lines)}: split by groups, or remove the duplicates" if lines else None


def _digest_inputs(data: Dataset) -> Iterator[bytes]:
    parts = [
        tensor.detach().cpu().contiguous().reshape(len(data), -1).view(torch.uint8).numpy()
        for _, tensor in tensors(data.x)
    ]
    for sample in zip(*parts, strict=True):
        yield hashlib.blake2b(b"".join(row.tobytes() for row in sample), digest_size=16).digest()


def find_target_feature(train: Dataset) -> int | None:
    """Return the index of a feature that is a copy of the target, in any encoding; None if there is none.

    A copy of class labels has one value per class. A copy of numeric targets has a linear correlation of 1 with them.
    """
    x, y = train.x, train.y
    if (
        not (train.in_memory and isinstance(x, Tensor) and isinstance(y, Tensor))
        or x.ndim != 2
        or len(x) < _MIN_SAMPLES
    ):
        return None
    target = y.reshape(len(y), -1)
    if target.shape[1] != 1 or x.shape[1] > _MAX_FEATURES:
        return None
    if not y.dtype.is_floating_point:
        return _find_label_feature(x, target[:, 0])
    features, values = x.double(), target[:, 0].double()
    centered, residual = features - features.mean(0), values - values.mean()
    norms = centered.norm(dim=0) * residual.norm()
    correlation = torch.where(norms > 0, (centered * residual[:, None]).sum(0) / norms, 0).abs()
    best = int(correlation.argmax())
    return best if float(correlation[best]) > _CORRELATION else None


def _find_label_feature(x: Tensor, labels: Tensor) -> int | None:
    classes = torch.unique(labels)
    if len(classes) < 2:
        return None
    for index, column in enumerate(x.unbind(1)):
        values, codes = torch.unique(column, return_inverse=True)
        if len(values) == len(classes):
            pairs = codes * len(classes) + torch.searchsorted(classes, labels)
            if len(torch.unique(pairs)) == len(classes):
                return index
    return None
