"""Data that are made sample by sample: a torch or Hugging Face dataset, a ragged list, a file mapped to memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils import data as torch_data

from hpsearch.objectives.errors import ObjectiveError, blame
from hpsearch.objectives.training.data.tree import Tree

# A list of samples -> inputs and targets, as the model and the loss take them.
Collate = Callable[[list[Any]], Any]

_ENDS = 1 << 16
TARGETS = ("labels", "label", "target", "targets", "y")  # what a dictionary calls them


def collated(
    samples: Sequence[Any], rows: Sequence[int], collate: Collate | None, names: Sequence[int]
) -> tuple[Tree, Tree]:
    """Return inputs and targets of the samples at `rows`, which error messages call `names`."""
    try:
        read = getattr(samples, "__getitems__", None)  # all at once, as a DataLoader reads them
        found = read(rows) if read is not None else [samples[row] for row in rows]
    except Exception as error:  # whatever the user's code raises
        raise _unreadable(samples, rows, names, error) from error
    return _pair(_joined(found, names, collate or torch_data.default_collate, own=collate is not None))


def _unreadable(samples: Sequence[Any], rows: Sequence[int], names: Sequence[int], error: Exception) -> ObjectiveError:
    """The error of a batch, as that of its first sample that cannot be read alone."""
    for row, name in zip(rows, names, strict=True):
        try:
            samples[row]
        except Exception as alone:  # as above
            return ObjectiveError(f"sample {name} cannot be read: {blame(alone)}")
    return ObjectiveError(f"samples {names[0]} to {names[-1]} cannot be read: {blame(error)}")


def _joined(found: list[Any], names: Sequence[int], collate: Collate, *, own: bool) -> Any:
    try:
        return collate(found)
    except Exception as error:  # as above
        for count, name in enumerate(names, start=1):
            alone, together = ("", [found[count - 1]]), (f", the {count}th of a batch", found[:count])
            for where, samples in (alone, together) if own else (alone,):
                try:
                    collate(samples)
                except Exception as reason:  # as above
                    raise ObjectiveError(f"collate fails at sample {name}{where}: {blame(reason)}") from reason
        first = str(error).strip().splitlines()[0]
        raise ObjectiveError(
            f"samples {names[0]} to {names[-1]} make no batch ({first}): give collate=, which makes one of a list"
        ) from error


def _pair(batch: Any) -> tuple[Tree, Tree]:
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, Mapping):
        names = [name for name in TARGETS if name in batch]
        if names:
            return {key: value for key, value in batch.items() if key != names[0]}, batch[names[0]]
        raise ObjectiveError(
            f"a batch has {', '.join(map(str, batch))}, and none of these is its targets: name them labels, or give a "
            "collate= that returns (inputs, targets)"
        )
    raise ObjectiveError(f"a batch must be a pair of inputs and targets, not {type(batch).__name__}: give collate=")


def padded(samples: list[Any]) -> tuple[dict[str, Tensor], Tensor]:
    """A collate for sequences of different lengths: pairs of ids [t] and a target.

    Returns:
        ``{"ids": [n, longest], "lengths": [n]}``, padded with 0, and the targets [n, ...].
    """
    sequences = [torch.as_tensor(sequence) for sequence, _ in samples]
    ids = pad_sequence(sequences, batch_first=True)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    return {"ids": ids, "lengths": lengths}, torch.as_tensor(np.asarray([target for _, target in samples]))


def as_input(tensor: Tensor) -> Tensor:
    """Convert floating point to float32 and integers other than uint8 to int64."""
    return tensor if tensor.dtype == torch.uint8 else as_target(tensor)


def as_target(tensor: Tensor) -> Tensor:
    """Convert floating point to float32 and integers to int64."""
    return tensor.to(torch.float32 if tensor.dtype.is_floating_point else torch.int64)


class Mapped:
    """Rows [n, ...] of an array in a memory-mapped file, which are read on use."""

    def __init__(self, array: np.ndarray[Any, Any], rows: Tensor | None = None) -> None:
        self._array = array
        self._rows = torch.arange(len(array)) if rows is None else rows
        self.shape = (len(self._rows), *array.shape[1:])
        self.dtype = self[:1].dtype

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        wanted = self._rows[rows].numpy()
        read = torch.from_numpy(np.array(self._array[wanted]))  # a copy: the file may be open for reading only
        return as_input(read)

    def take(self, rows: Tensor) -> Mapped:
        """Return the rows at `rows`."""
        return Mapped(self._array, self._rows[rows])

    def batches(self, size: int = 4096) -> Iterable[Tensor]:
        """All rows in their order."""
        for start in range(0, len(self), size):
            yield self[slice(start, start + size)]


def fingerprint_of(source: Any) -> str | None:
    """What a dataset says of its contents by itself: Hugging Face's, or that of one that a subset is of."""
    if isinstance(source, torch_data.Subset):
        inner = fingerprint_of(source.dataset)
        return None if inner is None else digest(inner, list(source.indices))
    own = getattr(source, "fingerprint", None) or getattr(source, "_fingerprint", None)
    return str(own() if callable(own) else own) if own else None


def targets_of(source: Any) -> Any:
    """The targets that a dataset has at hand, as torchvision's and Hugging Face's have; None where it has none."""
    if isinstance(source, torch_data.Subset):
        inner = targets_of(source.dataset)
        return None if inner is None else np.asarray(inner)[np.asarray(source.indices)]
    columns = getattr(source, "column_names", None)
    if isinstance(columns, list):
        names = [name for name in TARGETS if name in columns]
        return np.asarray(source[names[0]]) if names else None
    return getattr(source, "targets", None)


def fingerprint_files(folder: Path | str, pattern: str = "**/*") -> str:
    """A fingerprint of the files of a folder, the same on every machine that has them.

    SHA-256 over their names, their sizes and the first and last 64 KiB of each.

    Raises:
        ObjectiveError: there are none.
    """
    root = Path(folder)
    files = sorted(path for path in root.glob(pattern) if path.is_file())
    if not files:
        raise ObjectiveError(f"no files {pattern} in {folder}")
    found = hashlib.sha256()
    for path in files:
        found.update(f"{path.relative_to(root).as_posix()}:{path.stat().st_size}:".encode())
        with path.open("rb") as file:
            found.update(file.read(_ENDS))
            file.seek(max(path.stat().st_size - _ENDS, 0))
            found.update(file.read(_ENDS))
    return found.hexdigest()


def digest(*parts: Any) -> str:
    """SHA-256, in hexadecimal, of plain values."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def content_digest(samples: Sequence[Any]) -> str:
    """Return the SHA-256 of samples in memory: nested tensors, arrays, numbers and strings."""
    found = hashlib.sha256()
    for number, sample in enumerate(samples):
        try:
            _add(found, sample)
        except TypeError as error:
            raise ObjectiveError(
                f"sample {number} holds a {error}: give fingerprint=, which says what the data are"
            ) from error
    return found.hexdigest()


def _add(found: Any, value: Any) -> None:
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        array = np.ascontiguousarray(value.detach().cpu().numpy() if isinstance(value, Tensor) else value)
        if array.dtype == object:
            raise TypeError("array of objects")
        found.update(f"{array.dtype}:{array.shape}:".encode())
        found.update(array.data)
    elif isinstance(value, Mapping):
        for key in value:
            found.update(f"{key!r}=".encode())
            _add(found, value[key])
    elif isinstance(value, (tuple, list)):
        found.update(f"{len(value)}(".encode())
        for item in value:
            _add(found, item)
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        found.update(f"{value!r};".encode())
    else:
        raise TypeError(type(value).__name__)
