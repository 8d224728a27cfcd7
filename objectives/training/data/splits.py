"""The train, validation and test splits of a dataset."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils import data as torch_data

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.data.dataset import (
    Dataset,
    as_inputs,
    as_tree,
    convert_tensors,
    has_arrays,
    to_target_tensor_or_none,
)
from hpsearch.objectives.training.data.resplit import (
    compute_val_window_shift,
    divide_by_time_if_requested,
    resplit_if_requested,
    select_training_rows,
)
from hpsearch.objectives.training.data.samples import Collate, MemmapRows, as_target, hash_values
from hpsearch.objectives.training.data.split_rows import Blocks, Rows, draw_split, split_by_time
from hpsearch.objectives.training.data.tree import Tree, concatenate, describe_shapes, tensors


def _hash_parts(*parts: tuple[str, Dataset]) -> str:
    """Hash names, shapes, types and bytes of splits; samples that are not in memory are hashed by their fingerprint."""
    found = hashlib.sha256()
    for name, part in parts:
        if part.samples is not None:
            rows = None if part.rows is None else part.rows.tolist()
            found.update(f"{name}:{hash_values(part.fingerprint, rows)}:".encode())
        for tree in (part.x, part.y):
            for where, tensor in [("", tree)] if isinstance(tree, MemmapRows) else tensors(tree):
                dtype = str(tensor.dtype).removeprefix("torch.")
                found.update(f"{name}:{f'{where}:' if where else ''}{dtype}:{tuple(tensor.shape)}:".encode())
                for values in tensor.batches() if isinstance(tensor, MemmapRows) else (tensor,):
                    found.update(np.ascontiguousarray(values.detach().cpu().numpy()).data)
    return found.hexdigest()


def _check_part(name: str, part: Dataset, train: Dataset) -> None:
    """Reject a split that is empty, contains NaN or infinity, or differs in sample shape from the training split."""
    if not isinstance(part, Dataset):
        raise ObjectiveError(
            f"the {name} split must be an hpsearch.Dataset, not {type(part).__name__}; make it with "
            "hpsearch.Dataset.of(...)"
        )
    if len(part) == 0:
        raise ObjectiveError(f"the {name} split is empty")
    if part.samples is not None:
        return
    inputs, targets = len(part), {len(tensor) for _, tensor in tensors(part.y)}
    if targets != {inputs}:
        raise ObjectiveError(f"the {name} split has {inputs} inputs but {' and '.join(map(str, targets))} targets")
    for what, tree, model in (("inputs", part.x, train.x), ("targets", part.y, train.y)):
        if _describe_shapes(tree) != _describe_shapes(model):
            raise ObjectiveError(
                f"each sample of the {name} {what} is {_describe_shapes(tree)}, but {_describe_shapes(model)} "
                "in the train split"
            )
        parts = [tree] if isinstance(tree, MemmapRows) else [tensor for _, tensor in tensors(tree)]
        if what == "inputs" and not sum(math.prod(each.shape[1:]) for each in parts):
            raise ObjectiveError(f"the {name} inputs have no features; check the columns in data()")
        if not isinstance(tree, MemmapRows):
            _check_has_values(f"the {name} {what}", tree)
            _check_finite(f"the {name} {what}", tree)


def _check_has_values(what: str, tree: Tree) -> None:
    for _, tensor in tensors(tree):
        if tensor.is_meta:
            raise ObjectiveError(f"{what} are on the device 'meta', so they have no values; create them on the CPU")
        if tensor.requires_grad:
            raise ObjectiveError(f"{what} have a gradient graph; compute them under torch.no_grad() in data()")


def _check_finite(what: str, tree: Tree) -> None:
    for where, tensor in tensors(tree):
        if tensor.dtype.is_floating_point and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).reshape(len(tensor), -1).any(dim=1).sum())
            name = f"{what} {where!r}" if where else what
            remedy = "impute these values in data()" if what.endswith("inputs") else "remove these samples"
            raise ObjectiveError(f"{name} contain NaN or infinity in {bad} of {len(tensor)} samples; {remedy}")


def _describe_shapes(tree: Tree) -> str:
    return describe_shapes(tree[:1] if isinstance(tree, MemmapRows) else tree)


# Larger labels are ids, not classes.
_MANY_CLASSES, _CLASSES_PER_SAMPLE = 1_000_000, 100


@dataclass(frozen=True)
class Splits:
    """Disjoint training, validation and test data. Training uses only the hash of `test`.

    Attributes:
        train, val, test: the datasets.
        blocks: groups of the validation samples; None if the samples are independent.
        strata: categories of the validation samples [n] whose proportions the splits keep; None if there are none.
    """

    train: Dataset
    val: Dataset
    test: Dataset
    blocks: Blocks | None = None
    strata: Rows | None = None

    @classmethod
    def make(  # noqa: PLR0913 options of the split, by keyword
        cls,
        x: Any,
        y: Any = None,
        *,
        seed: int,
        val: float = 0.2,
        test: float = 0.2,
        stratify: Any = True,
        groups: Any | None = None,
        times: Any | None = None,
        load: Callable[[Tensor], Tensor] | None = None,
        collate: Collate | None = None,
        fingerprint: str | None = None,
    ) -> Splits:
        """Split n samples at random, by groups or by time. The result depends only on the arguments.

        For runs of finalists, validation samples are drawn again from the study's training samples, and the test split
        stays the same. In a split by time, the validation window moves back in time.

        Args:
            x: inputs [n, ...], or a dict or tuple of them. Floating point becomes float32, uint8 is kept, and other
                integers become int64; Boolean masks in a dict or tuple are kept. A NumPy memmap is read lazily.
                Alternatively, samples for `Dataset.of`: a PyTorch or Hugging Face dataset, or, with `collate`, a list.
            y: targets [n, ...], or a dict or tuple of them; integers become int64, floating point float32; Boolean
                masks in a dict or tuple are kept. With a list of inputs and `collate`, each sample is a pair of input
                and target. With a dataset, the targets for stratification and metrics, if known.
            seed: the study's seed.
            val: share of the validation split.
            test: share of the test split.
            stratify: True to keep the class proportions in each split, if y contains class labels and `groups` is None.
                Integers that are not exactly 0 to k - 1 and are too rare to stratify are treated as numeric values.
                Alternatively, other categories [n] whose proportions to keep, such as the hospital of each sample.
            groups: group of each sample [n], such as a patient. No group is in two splits, and `val` and `test` are
                shares of the groups.
            times: time of each sample [n], numbers or datetimes. The earliest samples are for training, the latest for
                the test. Samples of equal time are in the same split. `seed` and `stratify` are ignored.
            load: see `Dataset`.
            collate: see `Dataset.of`.
            fingerprint: see `Dataset.of`.

        Raises:
            ObjectiveError: the shares leave a split empty, a class is too rare for all splits, or x is ragged.
        """
        data = _build_dataset(x, y, load, collate, fingerprint)
        if not len(data):
            raise ObjectiveError("x has no samples; check the source of the data")
        if min(val, test) <= 0 or val + test >= 1:
            raise ObjectiveError(f"val={val} and test={test} must be above 0, with a sum below 1")
        if times is not None:
            if groups is not None:
                raise ObjectiveError("groups and times cannot be combined; remove one of them")
            earliest, later, latest = split_by_time(
                times, len(data), val, test, back=compute_val_window_shift(val, test)
            )
            found = [*divide_by_time_if_requested(earliest, later, times), latest]
            moments = np.unique(np.asarray(times)[found[1]], return_inverse=True)[1]
            return cls(*_take_splits(data, found), Blocks(moments, ordered=True))
        rows = np.arange(len(data))
        classes = isinstance(data.y, Tensor) and data.y.ndim == 1 and not data.y.dtype.is_floating_point
        labels = data.y.numpy() if stratify is True and classes and groups is None else None
        is_given = not isinstance(stratify, bool)
        if is_given:
            labels = _number_categories(stratify, len(data), groups)
        grouped = None if groups is None else np.asarray(groups)
        try:
            parts = _draw_rows(rows, val, test, labels, grouped, seed)
        except ObjectiveError as error:
            if labels is None:
                raise
            if is_given or _are_classes(labels):
                raise ObjectiveError(f"{error}; use stratify=False to ignore the classes") from error
            labels = None
            parts = _draw_rows(rows, val, test, None, grouped, seed)
        parts = [np.sort(part) for part in parts]
        blocks = None if grouped is None else Blocks(np.unique(grouped[parts[1]], return_inverse=True)[1])
        return cls(*_take_splits(data, parts), blocks, None if labels is None else labels[parts[1]])

    def parts(self) -> Iterator[tuple[str, Dataset]]:
        """Iterate over the names and datasets of the three splits."""
        yield from (("train", self.train), ("validation", self.val), ("test", self.test))

    def hash(self) -> str:
        """Return the SHA-256 of shapes, types and bytes of all three splits.

        For samples that are not in memory, the hash covers their fingerprint, their rows and the known targets.
        """
        return _hash_parts(*self.parts())

    def hash_of(self, part: Literal["validation", "test"]) -> str:
        """Return the SHA-256 of one split."""
        return _hash_parts((part, dict(self.parts())[part]))

    def check(self, *, joined: bool = False) -> None:
        """Check that splits are non-empty, finite, of equal sample shapes, and without shared rows.

        Args:
            joined: whether the training split may contain the validation samples, as in a refit.

        Raises:
            ObjectiveError: a check fails.
        """
        for name, part in self.parts():
            _check_part(name, part, self.train)
        seen: set[int] = set()
        for name, part in self.parts():
            if joined and part is self.val:
                continue
            rows = set() if part.rows is None else set(part.rows.tolist())
            if seen & rows:
                raise ObjectiveError(f"the {name} split shares {len(seen & rows)} samples with another split")
            seen |= rows

    def check_classes(self, ignored: int | None = None) -> None:
        """Check that there are two classes, and that each label is from 0 to the largest training label, or `ignored`.

        Raises:
            ObjectiveError: the training labels are all equal, or a label is out of range.
        """
        labels = {name: part.y for name, part in self.parts() if isinstance(part.y, Tensor)}
        counted = {name: y if ignored is None else y[y != ignored] for name, y in labels.items()}
        if (kinds := len(torch.unique(counted["train"]))) < 2:
            found = f"all train labels are {int(counted['train'][0])}" if kinds else "no train sample has a class"
            raise ObjectiveError(f"{found}, so there is nothing to learn; check the labels and the splits")
        classes = int(counted["train"].max()) + 1
        if classes > max(_MANY_CLASSES, _CLASSES_PER_SAMPLE * len(counted["train"])):
            raise ObjectiveError(
                f"the train labels go up to {classes - 1}, and memory for all these classes would be needed; "
                "number the classes from 0, for example with torch.unique(y, return_inverse=True)"
            )
        for name, y in counted.items():
            if not len(y):
                continue
            low, high = int(y.min()), int(y.max())
            if low < 0:
                raise ObjectiveError(
                    f"the {name} labels are in [{low}, {high}]; number the classes from 0, for example with "
                    "torch.unique(y, return_inverse=True), or set the loss's ignore_index to "
                    f"{low} if it marks samples without a class"
                )
            if high >= classes:
                raise ObjectiveError(f"the {name} labels are in [{low}, {high}], but must be in [0, {classes - 1}]")


def _number_categories(categories: Any, samples: int, groups: Any | None) -> Rows:
    """Return the number of the category of each sample [n], from any values [n]."""
    if groups is not None:
        raise ObjectiveError("groups and categories for stratify cannot be combined; remove one of them")
    given = np.asarray(categories)
    if given.shape != (samples,):
        raise ObjectiveError(
            f"stratify has the shape {list(given.shape)}; give one category for each of {samples} samples"
        )
    return np.asarray(np.unique(given, return_inverse=True)[1])


def _draw_rows(rows: Rows, val: float, test: float, labels: Rows | None, groups: Rows | None, seed: int) -> list[Rows]:
    """Split rows into training, validation and test by `seed`; redraw the first two if a new split is requested."""
    rest, held_out = draw_split(rows, test, labels, groups, seed)
    train, valid = draw_split(rest, val / (1 - test), labels, groups, seed)
    return [*resplit_if_requested(train, valid, val / (1 - val - test), labels, groups), held_out]


def _take_splits(data: Dataset, parts: Sequence[Rows]) -> tuple[Dataset, Dataset, Dataset]:
    """Return the datasets of training, validation and test rows."""
    train, val, test = parts
    first, second, third = (data.take(torch.from_numpy(part)) for part in (select_training_rows(train, val), val, test))
    return first, second, third


def _are_classes(labels: Rows) -> bool:
    """Return whether the labels are exactly the integers 0 to k - 1."""
    found = np.unique(labels)
    return int(found[0]) == 0 and int(found[-1]) == len(found) - 1


def _build_dataset(
    x: Any, y: Any, load: Callable[[Tensor], Tensor] | None, collate: Collate | None, fingerprint: str | None
) -> Dataset:
    """Return the dataset of all samples, before the split."""
    if isinstance(x, torch_data.IterableDataset):
        raise ObjectiveError(
            f"{type(x).__name__} cannot be split; use Splits(train, val, test), each from Dataset.of(stream, length=)"
        )
    if hasattr(x, "__getitem__") and not has_arrays(x):
        return Dataset.of(x, collate=collate, fingerprint=fingerprint, targets=y)
    if collate is not None:
        if y is not None and len(x) != len(y):
            raise ObjectiveError(f"x has {len(x)} samples, but y has {len(y)}")
        pairs = list(x) if y is None else list(zip(x, y, strict=True))
        return Dataset.of(pairs, collate=collate, fingerprint=fingerprint, targets=to_target_tensor_or_none(y))
    if y is None:
        raise ObjectiveError("y is missing; pass the targets [n, ...], or pass x as y if step() needs no targets")
    data = Dataset(as_inputs(x), convert_tensors(as_target, as_tree(y, "y")), load=load)
    for what, tree in (("x", data.x), ("y", data.y)):
        lengths = {len(tensor) for _, tensor in tensors(tree)}
        if len(lengths) > 1:
            raise ObjectiveError(f"the parts of {what} have different lengths: {', '.join(map(str, sorted(lengths)))}")
    count = len(next(tensors(data.y))[1])
    if len(data) != count:
        raise ObjectiveError(f"x has {len(data)} samples, but y has {count}")
    return data


def merge_train_val(splits: Splits, *, by_make: bool) -> Splits:
    """Return the splits of `data()` with the validation samples added to the training samples.

    With `by_make`, `Splits.make` has already merged them, and `data()` may have filtered the result. In this case they
    are merged again only if `data()` itself split the merged samples afterwards.

    Raises:
        ObjectiveError: the splits cannot be merged.
    """
    train, val = splits.train, splits.val
    apart = train.rows is not None and val.rows is not None and not torch.isin(val.rows, train.rows).any()
    if by_make and not apart:
        return splits
    if not (train.in_memory and val.in_memory):
        raise ObjectiveError(
            "a refit needs train and validation splits that can be merged, but these are not in-memory tensors; "
            "split the data with Splits.make(), or use in-memory tensors"
        )
    for what, one, other in (("x", train.x, val.x), ("y", train.y, val.y)):
        if describe_shapes(one) != describe_shapes(other):
            raise ObjectiveError(
                f"a refit cannot merge train and val: {what} is {describe_shapes(one)} and {describe_shapes(other)}"
            )
    rows = None if train.rows is None or val.rows is None else torch.cat([train.rows, val.rows])
    x, y = concatenate([train.x, val.x]), concatenate([train.y, val.y])
    return replace(splits, train=replace(train, x=x, y=y, rows=rows))
