"""Datasets: tensors in memory, items on request, and streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils import data as torch_data

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.data.samples import (
    Collate,
    Mapped,
    as_input,
    as_target,
    collated,
    content_digest,
    fingerprint_of,
    targets_of,
)
from hpsearch.objectives.training.data.tree import Tree, map_tensors, moved, taken, tensors


class Stream:
    """The first samples of an iterable, such as a torch `IterableDataset`, by their numbers; `length` are an epoch.

    A pass in order reads each sample once. A higher number skips samples, a lower one restarts the iterable.
    """

    def __init__(self, source: Iterable[Any], length: int) -> None:
        if length < 1:
            raise ObjectiveError(f"length={length}: an epoch of a stream has at least one sample")
        self._source, self._length = source, length
        self._running: Iterator[Any] | None = None
        self._next = 0

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row: int) -> Any:
        if self._running is None or row < self._next:
            self._running, self._next = iter(self._source), 0
        while True:
            try:
                sample = next(self._running)
            except StopIteration:
                self._running = None
                raise ObjectiveError(
                    f"the stream ended after {self._next} samples: give that as its length, not {self._length}"
                ) from None
            self._next += 1
            if self._next > row:
                return sample

    def __getstate__(self) -> dict[str, Any]:
        """Without the iterator: another process begins its own."""
        return {**self.__dict__, "_running": None, "_next": 0}

    def set_epoch(self, epoch: int) -> None:
        """Tell a source that shuffles by itself, as Hugging Face's do, which epoch begins."""
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)


def is_arrays(x: Any) -> bool:
    """Whether these are columns of numbers, and not a dataset that gives samples."""
    return isinstance(x, (Tensor, np.ndarray, Mapping, list, tuple)) or hasattr(x, "__array__")


def known_targets(y: Any) -> Any:
    """Targets that are one value a sample; None where they are more, and nothing is known beforehand."""
    try:
        return None if y is None else plain(y)
    except (TypeError, ValueError, ObjectiveError):
        return None


def as_inputs(x: Any) -> Tree:
    """Inputs as tensors: floating point is float32, uint8 stays, other integers are int64; a mapped file stays one."""
    if isinstance(x, np.memmap):
        return Mapped(x)
    return map_tensors(as_input, as_tree(x, "x"))


def as_tree(values: Any, name: str) -> Tree:
    """Convert the arrays called `name` to tensors; a list is one array, a tuple or a dictionary is several."""
    if isinstance(values, Mapping):
        return {str(key): as_tree(value, f"{name}[{key!r}]") for key, value in values.items()}
    if isinstance(values, tuple) and not all(np.isscalar(value) for value in values):
        return tuple(as_tree(value, f"{name}[{number}]") for number, value in enumerate(values))
    if isinstance(values, Tensor):
        return values
    try:
        return torch.as_tensor(np.asarray(values))
    except (ValueError, TypeError) as error:
        shapes = [np.shape(value) for value in values]
        odd = next((k for k, shape in enumerate(shapes) if shape != shapes[0]), None)
        if odd is None:
            raise ObjectiveError(f"{name} holds what is no number: {error}") from error
        raise ObjectiveError(
            f"{name} is ragged: sample 0 has shape {list(shapes[0])} and sample {odd} {list(shapes[odd])}; "
            "give collate=, which makes a batch of a list of samples, such as `padded`"
        ) from error


def plain(values: Any) -> Tensor:
    """Targets as a tensor: integers are int64, floating point is float32."""
    return as_target(values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values)))


class Batch(NamedTuple):
    """Samples that are trained on or judged together.

    Attributes:
        x: inputs, as the model takes them.
        y: targets, as the loss takes them.
        size: number of samples.
    """

    x: Tree
    y: Tree
    size: int

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        return Batch(moved(self.x, device), moved(self.y, device), self.size)


@dataclass(frozen=True)
class Dataset:
    """Inputs x and targets y of n samples, kept in memory or made when they are needed.

    Attributes:
        x: inputs as the model takes them, raw: scaling belongs to the model. A tensor [n, ...], or a dict or tuple of
            such. With `load`, what stands for them: a number of a file, an encoded image. With `samples`, none.
        y: class labels (int64 [n]), values (float [n, ...]), or a dict or tuple of such; with `samples` what is known
            of the targets beforehand, or None.
        rows: where each sample stands in the source, if known: what shows that splits are disjoint.
        load: makes one sample's input from its entry in `x`; `TrainConfig.num_workers` processes call it.
        samples: in place of `x`, a sequence of samples, such as a torch `Dataset`.
        collate: makes a batch, (inputs, targets), of a list of samples; torch's default unless given.
        fingerprint: what stands for the contents of `samples` in the hash of the data.
    """

    x: Tree
    y: Tree
    rows: Tensor | None = None
    load: Callable[[Tensor], Tensor] | None = None
    samples: Sequence[Any] | None = None
    collate: Collate | None = None
    fingerprint: str | None = None

    @classmethod
    def of(
        cls,
        samples: Any,
        *,
        collate: Collate | None = None,
        fingerprint: str | None = None,
        targets: Any | None = None,
        length: int | None = None,
    ) -> Dataset:
        """A dataset over samples: a torch or Hugging Face dataset, or a list, whatever a sample is.

        Args:
            samples: what has a length and gives a sample by its number: a pair of input and target, or a dictionary in
                which one of the keys is `labels`, `label`, `target`, `targets` or `y`.
            collate: makes a batch, (inputs, targets), of a list of samples; torch's default unless given.
            fingerprint: what says that the contents are the same: see `fingerprint_files`. A Hugging Face dataset has
                its own, and a list in memory is read.
            targets: one a sample [n], for strata and for metrics; unless given, `samples.targets` or the column.
            length: how many samples are an epoch, of what is only iterated over, such as an `IterableDataset`: it is
                read in its own order, by at most one process, and shuffles by itself where it shall.

        Raises:
            ObjectiveError: there is no length, or no fingerprint.
        """
        what = type(samples).__name__
        if length is not None and not isinstance(samples, Stream):
            samples = Stream(samples, length)
        if isinstance(samples, torch_data.IterableDataset):
            raise ObjectiveError(f"{what} needs a length=: how many samples are an epoch")
        if not hasattr(samples, "__getitem__") or not hasattr(samples, "__len__"):
            raise ObjectiveError(f"{what} has no length or gives no sample by its number: make it a map-style Dataset")
        known = fingerprint or fingerprint_of(samples)
        if known is None and isinstance(samples, Stream):
            raise ObjectiveError(f"{what} needs a fingerprint=, which says what the data are")
        if known is None:
            if not isinstance(samples, (list, tuple)):
                raise ObjectiveError(f"{what} needs a fingerprint=, such as fingerprint_files(folder)")
            known = content_digest(samples)
        found = targets_of(samples) if targets is None else targets
        y = None if found is None else plain(found)
        if y is not None and len(y) != len(samples):
            raise ObjectiveError(f"there are {len(samples)} samples and {len(y)} targets")
        return cls(None, y, None, None, samples, collate, known)

    def __len__(self) -> int:
        if self.samples is not None:
            return len(self.samples)
        return len(self.x) if isinstance(self.x, Mapped) else len(next(tensors(self.x))[1])

    @property
    def is_stream(self) -> bool:
        """Whether its samples come in an order of their own."""
        return isinstance(self.samples, Stream)

    @property
    def in_memory(self) -> bool:
        """Whether all of it lies in tensors."""
        return self.load is None and self.samples is None and not isinstance(self.x, Mapped)

    def take(self, rows: Tensor) -> Dataset:
        """The samples at `rows`."""
        samples: Any = None
        if self.samples is not None:
            samples = torch_data.Subset(cast("torch_data.Dataset[Any]", self.samples), rows.tolist())
        x = self.x.take(rows) if isinstance(self.x, Mapped) else taken(self.x, rows)
        numbers = rows if self.rows is None else self.rows[rows]
        return replace(self, x=x, y=taken(self.y, rows), rows=numbers, samples=samples)

    def batch(self, rows: Tensor | slice) -> Batch:
        """Return the samples at `rows`."""
        if self.samples is not None:
            index = torch.arange(len(self))[rows] if isinstance(rows, slice) else rows
            numbers = index.tolist()
            names = numbers if self.rows is None else self.rows[index].tolist()
            return Batch(*collated(self.samples, numbers, self.collate, names), len(numbers))
        x = taken(self.x, rows) if not isinstance(self.x, Mapped) else self.x[rows]
        if self.load is not None:
            x = torch.stack([self.load(entry) for entry in x])
        y = taken(self.y, rows)
        return Batch(x, y, len(next(tensors(y))[1]))

    def inputs(self, rows: Tensor | slice) -> Tree:
        """The inputs at `rows` as the model takes them."""
        return self.batch(rows).x

    def to(self, device: torch.device | str) -> Dataset:
        """The same data on a device, where they lie in tensors."""
        return replace(self, x=moved(self.x, device), y=moved(self.y, device)) if self.in_memory else self
