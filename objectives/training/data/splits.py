"""The train, validation and test splits of a dataset."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils import data as torch_data

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.data.dataset import Dataset, as_inputs, as_tree, is_arrays, known_targets
from hpsearch.objectives.training.data.division import Blocks, Rows, by_time, divide, moved_back, trained_on, wanted
from hpsearch.objectives.training.data.samples import Collate, Mapped, as_target, digest
from hpsearch.objectives.training.data.tree import Tree, concatenated, form, map_tensors, tensors


def _hash(*parts: tuple[str, Dataset]) -> str:
    """Hash names, shapes, types and bytes of parts; the fingerprint stands for samples that are not in memory."""
    found = hashlib.sha256()
    for name, part in parts:
        if part.samples is not None:
            rows = None if part.rows is None else part.rows.tolist()
            found.update(f"{name}:{digest(part.fingerprint, rows)}:".encode())
        for tree in (part.x, part.y):
            for where, tensor in [("", tree)] if isinstance(tree, Mapped) else tensors(tree):
                dtype = str(tensor.dtype).removeprefix("torch.")
                found.update(f"{name}:{f'{where}:' if where else ''}{dtype}:{tuple(tensor.shape)}:".encode())
                for values in tensor.batches() if isinstance(tensor, Mapped) else (tensor,):
                    found.update(np.ascontiguousarray(values.detach().cpu().numpy()).data)
    return found.hexdigest()


def _check_part(name: str, part: Dataset, train: Dataset) -> None:
    """Reject a part that is empty, not finite, or of another form than the train split."""
    if not isinstance(part, Dataset):
        raise ObjectiveError(f"the {name} split must be a Dataset, not {type(part).__name__}")
    if len(part) == 0:
        raise ObjectiveError(f"the {name} split is empty")
    if part.samples is not None:
        return
    given, wanted = len(part), {len(tensor) for _, tensor in tensors(part.y)}
    if wanted != {given}:
        raise ObjectiveError(f"the {name} split has {given} inputs but {' and '.join(map(str, wanted))} targets")
    for what, tree, model in (("inputs", part.x, train.x), ("targets", part.y, train.y)):
        if _form(tree) != _form(model):
            raise ObjectiveError(
                f"the {name} {what} are {_form(tree)} a sample, but those of the train split are {_form(model)}"
            )
        if not isinstance(tree, Mapped):
            _check_finite(f"the {name} {what}", tree)


def _check_finite(what: str, tree: Tree) -> None:
    for where, tensor in tensors(tree):
        if tensor.dtype.is_floating_point and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).reshape(len(tensor), -1).any(dim=1).sum())
            name = f"{what} {where!r}" if where else what
            remedy = (
                "fill them in data(), with a column that marks them" if what.endswith("inputs") else "leave those out"
            )
            raise ObjectiveError(f"{name} hold NaN or infinity in {bad} of {len(tensor)} samples: {remedy}")


def _form(tree: Tree) -> str:
    return form(tree[:1] if isinstance(tree, Mapped) else tree)


_MOST = 0.5  # share of what a study trains on that a fresh division validates on
_CLOSE = 0.05  # sizes that differ by less are alike


@dataclass(frozen=True)
class Splits:
    """Disjoint train, validation and test data. Training sees `test` only as a hash.

    Attributes:
        train, val, test: the parts.
        blocks: what of the validation samples belongs together; None where each stands for itself.
    """

    train: Dataset
    val: Dataset
    test: Dataset
    blocks: Blocks | None = None

    @classmethod
    def make(  # noqa: PLR0913 each is a way to divide, and all but the data are by keyword
        cls,
        x: Any,
        y: Any = None,
        *,
        seed: int,
        val: float = 0.2,
        test: float = 0.2,
        stratify: bool = True,
        groups: Any | None = None,
        times: Any | None = None,
        load: Callable[[Tensor], Tensor] | None = None,
        collate: Collate | None = None,
        fingerprint: str | None = None,
    ) -> Splits:
        """Splits n samples, at random or by time: a pure function of the arguments.

        Where finalists are trained, validation samples are drawn anew, from those that the study trains on, and the
        test split stays; by time they are moved back.

        Args:
            x: inputs [n, ...], or a dict or tuple of such: floating point becomes float32, uint8 stays as it is, other
                integers become int64, and an array that is mapped to memory is read as it is used. Or samples, as
                `Dataset.of` takes them: a torch or Hugging Face dataset, or with `collate` a list.
            y: targets [n, ...], or a dict or tuple of such; integers become int64, floating point float32. With a list
                of inputs and `collate`, a sample is the pair of an input and its target; with a dataset, what is known
                of the targets.
            seed: the study's seed.
            val: share of the validation split.
            test: share of the test split.
            stratify: keep the shares of the classes in each split, where y has classes and there are no `groups`.
                Integers that are not all of 0 to k - 1 and too rare for that are values, and are drawn at random.
            groups: a group per sample [n] (a patient, a scan): no group is divided between splits, and the shares
                are shares of the groups.
            times: when each sample was taken [n], numbers or datetimes: the earliest are trained on, the latest are
                the test split, and no moment is divided. `seed` and `stratify` then have nothing to decide.
            load: see `Dataset`.
            collate, fingerprint: see `Dataset.of`.

        Raises:
            ObjectiveError: the shares leave a split empty, a class is too rare to be in each split, or x is ragged.
        """
        data = _whole(x, y, load, collate, fingerprint)
        if min(val, test) <= 0 or val + test >= 1:
            raise ObjectiveError(f"val={val} and test={test} must be above 0 and leave something to train on")
        if times is not None:
            if groups is not None:
                raise ObjectiveError("give groups or times: a split by both has no single answer")
            found = by_time(times, len(data), val, test, earlier=moved_back(wanted(), val, test))
            moments = np.unique(np.asarray(times)[found[1]], return_inverse=True)[1]
            return cls(*_taken(data, found), Blocks(moments, ordered=True))
        rows = np.arange(len(data))
        classes = isinstance(data.y, Tensor) and data.y.ndim == 1 and not data.y.dtype.is_floating_point
        labels = data.y.numpy() if stratify and classes and groups is None else None
        grouped = None if groups is None else np.asarray(groups)
        try:
            parts = _drawn(rows, val, test, labels, grouped, seed)
        except ObjectiveError as error:
            if labels is None:
                raise
            if _are_classes(labels):
                raise ObjectiveError(f"{error}; stratify=False draws without regard to classes") from error
            parts = _drawn(rows, val, test, None, grouped, seed)
        parts = [np.sort(part) for part in parts]
        blocks = None if grouped is None else Blocks(np.unique(grouped[parts[1]], return_inverse=True)[1])
        return cls(*_taken(data, parts), blocks)

    def parts(self) -> Iterator[tuple[str, Dataset]]:
        """The splits with their names."""
        yield from (("train", self.train), ("validation", self.val), ("test", self.test))

    def hash(self) -> str:
        """SHA-256 over shapes, types and bytes of all three splits: the same data, split the same way.

        Of samples that are not in memory it is over their fingerprint, their rows and what is known of their targets.
        """
        return _hash(*self.parts())

    def hash_of(self, part: Literal["validation", "test"]) -> str:
        """SHA-256 over one of them."""
        return _hash((part, dict(self.parts())[part]))

    def check(self, *, joined: bool = False) -> None:
        """Reject an empty split, different shapes, NaN or infinity, and shared rows.

        With `joined`, as in a refit, the training split may have the validation samples.
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
        """Reject labels below 0 or above those of the train split; `ignored` is no label."""
        labels = {name: part.y for name, part in self.parts() if isinstance(part.y, Tensor)}
        counted = {name: y if ignored is None else y[y != ignored] for name, y in labels.items()}
        classes = int(counted["train"].max()) + 1
        for name, y in counted.items():
            if len(y) and not 0 <= int(y.min()) <= int(y.max()) < classes:
                raise ObjectiveError(
                    f"the {name} labels go from {int(y.min())} to {int(y.max())}, "
                    f"but the train split has classes 0 to {classes - 1}"
                )


def _drawn(rows: Rows, val: float, test: float, labels: Rows | None, groups: Rows | None, seed: int) -> list[Rows]:
    """Train, validation and test rows, drawn by `seed`; train and validation anew where that is wanted."""
    rest, held = divide(rows, test, labels, groups, seed)
    train, valid = divide(rest, val / (1 - test), labels, groups, seed)
    division = wanted()
    if division is None:
        return [train, valid, held]
    share = min(val / (1 - val - test), _MOST)
    for strata in (labels, None):
        with suppress(ObjectiveError):  # a class or a group is too rare to be divided once more
            return [*_divided_anew(train, valid, share, strata, groups, division), held]
    return [train, valid, held]


def _divided_anew(
    train: Rows, valid: Rows, share: float, labels: Rows | None, groups: Rows | None, division: int
) -> tuple[Rows, Rows]:
    """Return train and validation rows of a division, with as many training rows as in the study.

    The validation rows come from the study's training rows, because the study's validation rows have chosen the
    configuration and would favour it again. Training uses those in exchange.
    """
    kept, fresh = divide(train, share, labels, groups, division)
    if len(fresh) < len(valid) * (1 - _CLOSE):
        with suppress(ObjectiveError):  # too few to take a part of them
            _, valid = divide(valid, len(fresh) / len(valid), None, groups, division)
    return np.concatenate([kept, valid]), fresh


def _taken(data: Dataset, parts: Sequence[Rows]) -> tuple[Dataset, Dataset, Dataset]:
    """The data of train, validation and test rows."""
    train, val, test = parts
    first, second, third = (data.take(torch.from_numpy(part)) for part in (trained_on(train, val), val, test))
    return first, second, third


def _are_classes(labels: Rows) -> bool:
    """Whether integers are numbers of classes: all of 0 to k - 1."""
    found = np.unique(labels)
    return int(found[0]) == 0 and int(found[-1]) == len(found) - 1


def _whole(
    x: Any, y: Any, load: Callable[[Tensor], Tensor] | None, collate: Collate | None, fingerprint: str | None
) -> Dataset:
    """All of the data, before they are divided."""
    if isinstance(x, torch_data.IterableDataset):
        raise ObjectiveError(
            f"{type(x).__name__} cannot be divided: give Splits(train, val, test), each by Dataset.of(stream, length=)"
        )
    if hasattr(x, "__getitem__") and not is_arrays(x):
        return Dataset.of(x, collate=collate, fingerprint=fingerprint, targets=y)
    if collate is not None:
        if y is not None and len(x) != len(y):
            raise ObjectiveError(f"x has {len(x)} samples and y has {len(y)}")
        pairs = list(x) if y is None else list(zip(x, y, strict=True))
        return Dataset.of(pairs, collate=collate, fingerprint=fingerprint, targets=known_targets(y))
    if y is None:
        raise ObjectiveError("y is missing: give the targets [n, ...], or x again where step() needs none")
    data = Dataset(as_inputs(x), map_tensors(as_target, as_tree(y, "y")), load=load)
    for what, tree in (("x", data.x), ("y", data.y)):
        lengths = {len(tensor) for _, tensor in tensors(tree)}
        if len(lengths) > 1:
            raise ObjectiveError(f"the parts of {what} have different lengths: {', '.join(map(str, sorted(lengths)))}")
    count = len(next(tensors(data.y))[1])
    if len(data) != count:
        raise ObjectiveError(f"x has {len(data)} samples and y has {count}")
    return data


def joined(splits: Splits, *, by_make: bool) -> Splits:
    """Return the splits of `data()` with the validation samples added to the training samples.

    With `by_make`, `Splits.make` has joined them already, and `data()` may have filtered the result. They are joined
    again only if `data()` then divided the joined samples itself.

    Raises:
        ObjectiveError: they cannot be joined.
    """
    train, val = splits.train, splits.val
    apart = train.rows is not None and val.rows is not None and not torch.isin(val.rows, train.rows).any()
    if by_make and not apart:
        return splits
    if not (train.in_memory and val.in_memory):
        raise ObjectiveError(
            "a refit is trained on train and validation, and these parts do not lie in tensors, so that they cannot be "
            "joined: let Splits.make() divide the data, or give parts in tensors"
        )
    for what, one, other in (("x", train.x, val.x), ("y", train.y, val.y)):
        if form(one) != form(other):
            raise ObjectiveError(f"a refit cannot join train and validation: {what} is {form(one)} and {form(other)}")
    rows = None if train.rows is None or val.rows is None else torch.cat([train.rows, val.rows])
    x, y = concatenated([train.x, val.x]), concatenated([train.y, val.y])
    return replace(splits, train=replace(train, x=x, y=y, rows=rows))
