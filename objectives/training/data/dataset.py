"""Data in memory: datasets, splits that depend on the data and a seed alone, and batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from objectives.errors import ObjectiveError
from objectives.training.data.split import Rows, by_time, divide


@dataclass(frozen=True)
class Dataset:
    """Inputs x [n, ...] and targets y [n, ...], kept in memory or loaded when they are needed.

    Attributes:
        x: inputs as the model takes them, raw: scaling belongs to the model. With `load`, what stands for them: a
            number of a file, an encoded image. A tensor over a memory-mapped file is read as it is used.
        y: class labels (int64 [n]) or values (float [n, ...]).
        rows: where each sample stands in the source, if known: what shows that splits are disjoint.
        load: makes one sample's input from its entry in `x`; `TrainConfig.num_workers` processes call it.
    """

    x: Tensor
    y: Tensor
    rows: Tensor | None = None
    load: Callable[[Tensor], Tensor] | None = None

    def __len__(self) -> int:
        return len(self.x)

    def take(self, rows: Tensor) -> Dataset:
        """The samples at `rows`."""
        return Dataset(self.x[rows], self.y[rows], rows if self.rows is None else self.rows[rows], self.load)

    def inputs(self, rows: Tensor | slice) -> Tensor:
        """The inputs at `rows` [n, ...] as the model takes them."""
        x = self.x[rows]
        return x if self.load is None else torch.stack([self.load(entry) for entry in x])

    def to(self, device: torch.device | str) -> Dataset:
        """The same data on a device."""
        return Dataset(self.x.to(device), self.y.to(device), self.rows, self.load)


@dataclass(frozen=True)
class Splits:
    """Disjoint train, validation and test data. Training sees `test` only as a hash."""

    train: Dataset
    val: Dataset
    test: Dataset

    @classmethod
    def make(  # noqa: PLR0913 each is a way to divide, and all but the data are by keyword
        cls,
        x: Any,
        y: Any,
        *,
        seed: int,
        val: float = 0.2,
        test: float = 0.2,
        stratify: bool = True,
        groups: Any | None = None,
        times: Any | None = None,
        load: Callable[[Tensor], Tensor] | None = None,
    ) -> Splits:
        """Splits arrays or tensors of n samples, at random or by time: a pure function of the arguments.

        Args:
            x: inputs [n, ...]; floating point becomes float32, uint8 stays as it is, other integers become int64.
            y: targets [n, ...]; integers become int64, floating point float32.
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

        Raises:
            ObjectiveError: the shares leave a split empty, or a class is too rare to be in each split.
        """
        data = Dataset(_inputs(x), _targets(y), load=load)
        if len(data.x) != len(data.y):
            raise ObjectiveError(f"x has {len(data.x)} samples and y has {len(data.y)}")
        if min(val, test) <= 0 or val + test >= 1:
            raise ObjectiveError(f"val={val} and test={test} must be above 0 and leave something to train on")
        if times is not None:
            if groups is not None:
                raise ObjectiveError("give groups or times: a split by both has no single answer")
            return cls(*(data.take(torch.from_numpy(part)) for part in by_time(times, len(data), val, test)))
        rows = np.arange(len(data))
        classes = data.y.ndim == 1 and not data.y.dtype.is_floating_point
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
        return cls(*(data.take(torch.from_numpy(np.sort(part))) for part in parts))

    def parts(self) -> Iterator[tuple[str, Dataset]]:
        """The splits with their names."""
        yield from (("train", self.train), ("validation", self.val), ("test", self.test))

    def hash(self) -> str:
        """SHA-256 over shapes, types and bytes of all three splits: the same data, split the same way."""
        digest = hashlib.sha256()
        for name, part in self.parts():
            for tensor in (part.x, part.y):
                array = np.ascontiguousarray(tensor.detach().cpu().numpy())
                digest.update(f"{name}:{array.dtype}:{array.shape}:".encode())
                digest.update(array.data)
        return digest.hexdigest()

    def check(self) -> None:
        """Refuses data that cannot be trained on, before training starts.

        Raises:
            ObjectiveError: an empty split, shapes that differ, NaN or infinity, shared rows.
        """
        for name, part in self.parts():
            _check_part(name, part, self.train)
        seen: set[int] = set()
        for name, part in self.parts():
            rows = set() if part.rows is None else set(part.rows.tolist())
            if seen & rows:
                raise ObjectiveError(f"the {name} split shares {len(seen & rows)} samples with another split")
            seen |= rows

    def check_classes(self, ignored: int | None = None) -> None:
        """Refuses targets that are not the classes of the train split.

        Args:
            ignored: a target that stands for none.

        Raises:
            ObjectiveError: a label below 0, or above all that are trained on.
        """
        counted = {name: part.y if ignored is None else part.y[part.y != ignored] for name, part in self.parts()}
        classes = int(counted["train"].max()) + 1
        for name, y in counted.items():
            if len(y) and not 0 <= int(y.min()) <= int(y.max()) < classes:
                raise ObjectiveError(
                    f"the {name} labels go from {int(y.min())} to {int(y.max())}, "
                    f"but the train split has classes 0 to {classes - 1}"
                )


def _drawn(rows: Rows, val: float, test: float, labels: Rows | None, groups: Rows | None, seed: int) -> list[Rows]:
    """Train, validation and test rows, drawn by `seed`."""
    rest, held = divide(rows, test, labels, groups, seed)
    train, valid = divide(rest, val / (1 - test), labels, groups, seed)
    return [train, valid, held]


def _are_classes(labels: Rows) -> bool:
    """Whether integers are numbers of classes: all of 0 to k - 1."""
    found = np.unique(labels)
    return int(found[0]) == 0 and int(found[-1]) == len(found) - 1


def _inputs(values: Any) -> Tensor:
    tensor = torch.as_tensor(np.asarray(values) if not isinstance(values, Tensor) else values)
    return tensor if tensor.dtype == torch.uint8 else _plain(tensor)


def _targets(values: Any) -> Tensor:
    return _plain(torch.as_tensor(np.asarray(values) if not isinstance(values, Tensor) else values))


def _plain(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32 if tensor.dtype.is_floating_point else torch.int64)


def _check_part(name: str, part: Dataset, train: Dataset) -> None:
    if not isinstance(part, Dataset):
        raise ObjectiveError(f"the {name} split must be a Dataset, not {type(part).__name__}")
    if len(part.x) == 0:
        raise ObjectiveError(f"the {name} split is empty")
    if len(part.x) != len(part.y):
        raise ObjectiveError(f"the {name} split has {len(part.x)} inputs but {len(part.y)} targets")
    for what, tensor, model in (("inputs", part.x, train.x), ("targets", part.y, train.y)):
        if tensor.shape[1:] != model.shape[1:] or tensor.dtype != model.dtype:
            raise ObjectiveError(
                f"the {name} {what} are {_form(tensor)} a sample, but those of the train split are {_form(model)}"
            )
        if tensor.dtype.is_floating_point and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).reshape(len(tensor), -1).any(dim=1).sum())
            raise ObjectiveError(f"the {name} {what} hold NaN or infinity in {bad} of {len(tensor)} samples")


def _form(tensor: Tensor) -> str:
    return f"{list(tensor.shape[1:])} {str(tensor.dtype).removeprefix('torch.')}"


def steps_per_epoch(samples: int, *, batch_size: int, accumulate: int, drop_last: bool) -> int:
    """Optimizer steps in one epoch."""
    batches = -(-samples // batch_size)
    if drop_last and batches > 1 and samples % batch_size:
        batches -= 1
    return -(-batches // accumulate)


def windows(
    samples: int,
    *,
    batch_size: int,
    accumulate: int,
    drop_last: bool,
    seed: int,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[Tensor, ...]]:
    """The rows of one epoch in random order, as the micro-batches of each optimizer step.

    The last window may be shorter; with `drop_last` a short last micro-batch is left out unless it is the only one.
    """
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed)).to(device)
    batches = torch.split(order, batch_size)
    if drop_last and len(batches) > 1 and len(batches[-1]) < batch_size:
        batches = batches[:-1]
    for start in range(0, len(batches), accumulate):
        yield batches[start : start + accumulate]
