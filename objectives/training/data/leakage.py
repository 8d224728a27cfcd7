"""Signs in the content of splits that a validation or test score will be too good."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator

import torch

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.data.dataset import Dataset
from hpsearch.objectives.training.data.equal_samples import bound_probability_of_equal_samples
from hpsearch.objectives.training.data.near_duplicates import count_near_duplicates
from hpsearch.objectives.training.data.splits import Splits
from hpsearch.objectives.training.data.target_feature import count_targets_in_inputs, find_target_feature
from hpsearch.objectives.training.data.tree import tensors

_MIN_SHARE = 0.01  # of a split; fewer shared samples can be natural, and change the score little
_DEVIATIONS = 3.0  # standard deviations of a number of shared samples that can be chance
_MIN_NEAR_SHARE = 0.02  # of the compared samples; fewer near duplicates change the score little
_MIN_NEAR_SAMPLES = 3
_MIN_TARGET_SHARE = 0.5  # of a split; windows at the end of the training split overlap with later ones naturally

KINDS = ("shared_samples", "near_duplicates", "target_in_features")

# Of the last splits, by their hash: a command checks its data before the training and for the report, and a worker
# trains many trials on one split.
_LEAKS: dict[tuple[str, bool], dict[str, str]] = {}


def find_leaks_once(splits: Splits, split_hash: str, *, allow_equal: bool = False) -> dict[str, str]:
    """Return the result of `find_leaks`, which is computed again only for splits with another hash.

    Raises:
        ObjectiveError: as for `find_leaks`.
    """
    key = split_hash, allow_equal
    if key not in _LEAKS:
        found = find_leaks(splits, allow_equal=allow_equal)
        _LEAKS.clear()
        _LEAKS[key] = found
    return _LEAKS[key]


def find_leaks(splits: Splits, *, allow_equal: bool = False) -> dict[str, str]:
    """Return the signs of leakage in data that are in memory: a description by kind, one of `KINDS`.

    Raises:
        ObjectiveError: all samples of a split are in another split, so that its score is meaningless, and
            `allow_equal` is not set.
    """
    digests = {name: list(_digest_inputs(part)) for name, part in splits.parts() if part.in_memory}
    found = {
        "shared_samples": _describe_shared_samples(splits, digests, allow_equal=allow_equal),
        "near_duplicates": _describe_near_duplicates(splits, digests),
        "target_in_features": _describe_target_feature(splits.train) or _describe_targets_in_inputs(splits),
    }
    return {kind: sign for kind, sign in found.items() if sign is not None}


def count_shared_inputs(one: Dataset, other: Dataset) -> int:
    """Return the number of inputs of `other` that are also in `one`, bit for bit; 0 for data that are not in memory."""
    if not (one.in_memory and other.in_memory):
        return 0
    seen = set(_digest_inputs(one))
    return sum(digest in seen for digest in _digest_inputs(other))


def _describe_target_feature(train: Dataset) -> str | None:
    feature = find_target_feature(train)
    return None if feature is None else f"{feature} alone predicts the target almost perfectly; remove it from x"


def _describe_targets_in_inputs(splits: Splits) -> str | None:
    """Return the shares of targets that the training inputs contain; None if they are few."""
    lines = []
    for name, part in (("validation", splits.val), ("test", splits.test)):
        found = count_targets_in_inputs(part, splits.train)
        if found and found >= _MIN_TARGET_SHARE * len(part):
            lines.append(f"{found} of {len(part)} {name} targets are values in train inputs")
    return f"{', '.join(lines)}: split by times" if lines else None


def _describe_near_duplicates(splits: Splits, digests: dict[str, list[bytes]]) -> str | None:
    """Return the shares of samples with near duplicates in another split, by pairs of splits; None if they are few."""
    parts, lines = dict(splits.parts()), []
    for first, second in itertools.combinations(digests, 2):
        row_by_digest = {digest: row for row, digest in enumerate(digests[first])}
        others = [row for row, digest in enumerate(digests[second]) if digest not in row_by_digest]
        near = count_near_duplicates(parts[second], parts[first], others, sorted(row_by_digest.values()))
        if near.found >= max(_MIN_NEAR_SAMPLES, _MIN_NEAR_SHARE * near.compared):
            lines.append(f"{near.found} of {near.compared} {second} inputs are near duplicates of {first} inputs")
    return f"{', '.join(lines)}: split by groups, or remove the duplicates" if lines else None


def _describe_shared_samples(splits: Splits, digests: dict[str, list[bytes]], *, allow_equal: bool) -> str | None:
    """Return the numbers of shared samples of the pairs of splits; None if they are few, or can be chance."""
    lines, probability = [], bound_probability_of_equal_samples(splits.train, digests.values())
    for (first, ours), (second, theirs) in itertools.combinations(digests.items(), 2):
        known, expected = set(ours), probability * len(ours) * len(theirs)
        shared = sum(digest in known for digest in theirs)
        if shared <= max(_MIN_SHARE * len(theirs), expected + _DEVIATIONS * math.sqrt(expected)):
            continue
        if shared == len(theirs) and not allow_equal:
            raise ObjectiveError(
                f"all {shared} {second} samples are also {first} samples, so their score is meaningless; "
                "split the data with Splits.make(), or add 'shared_samples' to ignored_leaks"
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
