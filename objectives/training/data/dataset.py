"""Datasets: in-memory tensors, lazily loaded samples, and streams."""

from __future__ import annotations

import warnings
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
    MemmapRows,
    as_input,
    as_target,
    collate_rows,
    find_fingerprint,
    find_targets,
    hash_samples,
)
from hpsearch.objectives.training.data.tree import Tree, index_rows, map_tensors, tensors, to_device

_MAX_STREAM_LENGTH = 10**9  # an epoch holds the indices of its samples in memory


class Stream:
    """Indexed access to the first `length` samples of an iterable, such as a PyTorch `IterableDataset`.

    Access in ascending order reads each sample once. A gap skips samples, and a lower index restarts the iterable.
    """

    def __init__(self, source: Iterable[Any], length: int) -> None:
        if not isinstance(length, int) or not 1 <= length <= _MAX_STREAM_LENGTH:
            limits = f"from 1 to {_MAX_STREAM_LENGTH:,}"
            raise ObjectiveError(f"length, the number of samples per epoch, must be {limits}, not {length!r}")
        if isinstance(source, Iterator) and type(source).__module__ in ("builtins", "itertools"):  # such as a generator
            raise ObjectiveError(
                f"the {type(source).__name__} does not start again at each epoch; pass an iterable that does, such as "
                "a list or an object whose __iter__ opens the source"
            )
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
                if self._next == 0:
                    raise ObjectiveError(
                        "the stream has no samples; pass an iterable that starts again at each epoch, not an iterator"
                    ) from None
                raise ObjectiveError(
                    f"the stream ended after {self._next} samples; set length={self._next} instead of {self._length}"
                ) from None
            self._next += 1
            if self._next > row:
                return sample

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the iterator, because each process creates its own iterator."""
        return {**self.__dict__, "_running": None, "_next": 0}

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the source if it has this method, as Hugging Face's streams do."""
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)


def has_arrays(x: Any) -> bool:
    """Return whether x consists of arrays, not of a dataset with samples."""
    return isinstance(x, (Tensor, np.ndarray, Mapping, list, tuple)) or hasattr(x, "__array__") or hasattr(x, "toarray")


def to_target_tensor_or_none(y: Any) -> Any:
    """Return targets as a tensor; None if targets are missing or cannot be converted to one tensor."""
    try:
        return None if y is None else to_target_tensor(y)
    except (TypeError, ValueError, ObjectiveError):
        return None


def as_inputs(x: Any) -> Tree:
    """Convert inputs to tensors: float32, uint8, int64, or Boolean masks. A NumPy memmap becomes `MemmapRows`."""
    if isinstance(x, np.memmap):
        return MemmapRows(x)
    return convert_tensors(as_input, as_tree(x, "x"))


def convert_tensors(convert: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """Convert a tensor, or the tensors of a structure except those of Booleans, which may be masks."""
    if isinstance(tree, Tensor):
        return convert(tree)
    return map_tensors(lambda tensor: tensor if tensor.dtype == torch.bool else convert(tensor), tree)


def as_tree(values: Any, name: str) -> Tree:
    """Convert an array, or a tuple or dictionary of arrays, to tensors. Error messages call the values `name`."""
    if isinstance(values, Mapping):
        return {str(key): as_tree(value, f"{name}[{key!r}]") for key, value in values.items()}
    if isinstance(values, tuple) and not all(np.isscalar(value) for value in values):
        return tuple(as_tree(value, f"{name}[{number}]") for number, value in enumerate(values))
    if isinstance(values, Tensor):
        return values
    try:
        return _to_tensor(values)
    except (ValueError, TypeError) as error:
        shapes = [np.shape(value) for value in values]
        odd = next((k for k, shape in enumerate(shapes) if shape != shapes[0]), None)
        if odd is None:
            raise ObjectiveError(f"{name} contains values that are not numbers: {error}") from error
        raise ObjectiveError(
            f"{name} is ragged: sample 0 has shape {list(shapes[0])} and sample {odd} has {list(shapes[odd])}; "
            "pass collate=, a function that makes a batch from a list of samples, such as `pad_collate`"
        ) from error


def _to_tensor(values: Any) -> Tensor:
    if np.ma.is_masked(values):
        raise ObjectiveError("the data have masked values; replace them, for example by x.filled(0)")
    if hasattr(values, "toarray"):
        raise ObjectiveError(f"the data have a sparse {type(values).__name__}; pass x.toarray()")
    array = np.asarray(values)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if any(stride < 0 for stride in array.strides):  # of a flipped array
        array = array.copy()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nothing writes to the data
        return torch.as_tensor(array)


def to_target_tensor(values: Any) -> Tensor:
    """Convert targets to an int64 or float32 tensor."""
    return as_target(values if isinstance(values, Tensor) else _to_tensor(values))


class Batch(NamedTuple):
    """Batch of samples.

    Attributes:
        x: inputs for the model.
        y: targets for the loss.
        size: number of samples.
    """

    x: Tree
    y: Tree
    size: int

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        return Batch(to_device(self.x, device), to_device(self.y, device), self.size)


@dataclass(frozen=True)
class Dataset:
    """Inputs x and targets y of n samples, in memory or loaded lazily.

    Attributes:
        x: raw inputs of the model (scaling belongs to the model): a tensor [n, ...], or a dict or tuple of tensors.
            With `load`, the entries that `load` converts, such as file numbers or encoded images. None with `samples`.
        y: class labels (int64 [n]), values (float [n, ...]), or a dict or tuple of them. With `samples`, the targets
            for stratification and metrics, or None.
        rows: index of each sample in the source [n], to check that splits are disjoint; None if unknown.
        load: converts one entry of `x` to an input; it runs in `TrainConfig.num_workers` processes.
        samples: a sequence of samples instead of `x`, such as a PyTorch `Dataset`.
        collate: makes a batch (inputs, targets) from a list of samples; PyTorch's `default_collate` by default.
        fingerprint: text that represents the contents of `samples` in the hash of the data.
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
        """Create a dataset from samples: a PyTorch or Hugging Face dataset, or a list.

        Args:
            samples: a sequence with `len()` and access by index. A sample is a pair of input and target, or a
                dictionary with a key `labels`, `label`, `target`, `targets` or `y`. With `length`, any iterable.
            collate: makes a batch (inputs, targets) from a list of samples; PyTorch's `default_collate` by default.
            fingerprint: text that changes if the contents change, such as `fingerprint_files(folder)`. Not needed for a
                Hugging Face dataset, which has one, and for a list in memory, which is hashed.
            targets: targets [n] for stratification and metrics; by default `samples.targets` or the column of targets.
            length: number of samples per epoch of an iterable without indices, such as an `IterableDataset`. At most
                one process reads the iterable, in its own order, so it must shuffle itself if needed.

        Raises:
            ObjectiveError: the length or the fingerprint is missing.
        """
        what = type(samples).__name__
        if length is not None and not isinstance(samples, Stream):
            samples = Stream(samples, length)
        if isinstance(samples, torch_data.IterableDataset):
            raise ObjectiveError(f"{what} needs length=, the number of samples per epoch")
        if not hasattr(samples, "__getitem__") or not hasattr(samples, "__len__"):
            raise ObjectiveError(f"{what} has no __len__ or no __getitem__; pass a map-style Dataset")
        known = fingerprint or find_fingerprint(samples)
        if known is None and isinstance(samples, Stream):
            raise ObjectiveError(f"{what} needs fingerprint=, a text that identifies the data")
        if known is None:
            if not isinstance(samples, (list, tuple)):
                raise ObjectiveError(f"{what} needs fingerprint=, such as fingerprint_files(folder)")
            known = hash_samples(samples)
        found = find_targets(samples) if targets is None else targets
        y = None if found is None else to_target_tensor(found)
        if y is not None and len(y) != len(samples):
            raise ObjectiveError(f"there are {len(samples)} samples, but {len(y)} targets")
        return cls(None, y, None, None, samples, collate, known)

    def __len__(self) -> int:
        if self.samples is not None:
            return len(self.samples)
        return len(self.x) if isinstance(self.x, MemmapRows) else len(next(tensors(self.x))[1])

    @property
    def is_stream(self) -> bool:
        """Whether the samples are a `Stream`, which has its own order."""
        return isinstance(self.samples, Stream)

    @property
    def in_memory(self) -> bool:
        """Whether all data are in-memory tensors."""
        return self.load is None and self.samples is None and not isinstance(self.x, MemmapRows)

    def take(self, rows: Tensor) -> Dataset:
        """Return a dataset of the samples at `rows`."""
        samples: Any = None
        if self.samples is not None:
            samples = torch_data.Subset(cast("torch_data.Dataset[Any]", self.samples), rows.tolist())
        x = self.x.take(rows) if isinstance(self.x, MemmapRows) else index_rows(self.x, rows)
        numbers = rows if self.rows is None else self.rows[rows]
        return replace(self, x=x, y=index_rows(self.y, rows), rows=numbers, samples=samples)

    def batch(self, rows: Tensor | slice) -> Batch:
        """Return the samples at `rows` as a batch."""
        if self.samples is not None:
            index = torch.arange(len(self))[rows] if isinstance(rows, slice) else rows
            numbers = index.tolist()
            names = numbers if self.rows is None else self.rows[index].tolist()
            return Batch(*collate_rows(self.samples, numbers, self.collate, names), len(numbers))
        x = index_rows(self.x, rows) if not isinstance(self.x, MemmapRows) else self.x[rows]
        if self.load is not None:
            x = torch.stack([self.load(entry) for entry in x])
        y = index_rows(self.y, rows)
        return Batch(x, y, len(next(tensors(y))[1]))

    def batches(self, size: int, device: torch.device | str | None = None) -> Iterator[Batch]:
        """Iterate over all samples in order, in batches of `size` samples; None does not move them to a device."""
        for start in range(0, len(self), size):
            batch = self.batch(slice(start, start + size))
            yield batch if device is None else batch.to(torch.device(device))

    def inputs(self, rows: Tensor | slice) -> Tree:
        """Return the model's inputs at `rows`."""
        return self.batch(rows).x

    def to(self, device: torch.device | str) -> Dataset:
        """Return the dataset on a device if it is in memory; otherwise return it unchanged."""
        return replace(self, x=to_device(self.x, device), y=to_device(self.y, device)) if self.in_memory else self
