"""Samples that are loaded one by one: PyTorch and Hugging Face datasets, ragged lists, memory-mapped files."""

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

from hpsearch.objectives.errors import ObjectiveError, format_user_error, get_first_line
from hpsearch.objectives.training.data.tree import Tree, leaves, map_tensors, tensors

# A list of samples -> a batch: inputs for the model, and targets for the loss.
Collate = Callable[[list[Any]], Any]

_EDGE_BYTES = 1 << 16
TARGET_KEYS = ("labels", "label", "target", "targets", "y")  # keys of the targets in a dictionary, by priority


def collate_rows(
    samples: Sequence[Any], rows: Sequence[int], collate: Collate | None, names: Sequence[int]
) -> tuple[Tree, Tree]:
    """Return inputs and targets of the samples at `rows`; error messages identify them by the numbers in `names`."""
    try:
        read = getattr(samples, "__getitems__", None)  # reads all rows in one call, as DataLoader does
        found = read(rows) if read is not None else [samples[row] for row in rows]
    except Exception as error:  # whatever the user's code raises
        raise ObjectiveError(_explain_read_error(samples, rows, names, error)) from error
    if collate is None:
        return _split_targets(_collate(found, names, torch_data.default_collate, own=False))
    return _split_targets(_copy_shared(_collate(found, names, collate, own=True), found))


def _copy_shared(batch: Any, samples: list[Any]) -> Any:
    """Return a batch with copies of tensors that share memory with samples, because models may change their inputs."""
    known = {_find_memory(leaf) for _, leaf in tensors(samples)}
    known |= {leaf.ctypes.data for _, leaf in leaves(samples) if isinstance(leaf, np.ndarray)}
    known.discard(0)
    if not any(_find_memory(tensor) in known for _, tensor in tensors(batch)):
        return batch
    return map_tensors(lambda tensor: tensor.clone() if _find_memory(tensor) in known else tensor, batch)


def _find_memory(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; 0 if the tensor is empty, sparse or nested."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def _explain_read_error(samples: Sequence[Any], rows: Sequence[int], names: Sequence[int], error: Exception) -> str:
    """Return the message about the first sample of a batch that cannot be read."""
    for row, name in zip(rows, names, strict=True):
        try:
            samples[row]
        except Exception as cause:  # as above
            return f"sample {name} cannot be read: {format_user_error(cause)}"
    return f"samples {names[0]} to {names[-1]} cannot be read: {format_user_error(error)}"


def _collate(found: list[Any], names: Sequence[int], collate: Collate, *, own: bool) -> Any:
    try:
        return collate(found)
    except Exception as error:  # as above
        if "allocate shared memory" in str(error):  # of a loader process
            raise ObjectiveError(
                f"no shared memory is left for batches ({get_first_line(error)}); set num_workers=0, or "
                "enlarge /dev/shm (with Docker: --shm-size)"
            ) from error
        for count, name in enumerate(names, start=1):
            single, together = ("", [found[count - 1]]), (f" (position {count} in the batch)", found[:count])
            for at, samples in (single, together) if own else (single,):
                try:
                    collate(samples)
                except Exception as cause:  # as above
                    raise ObjectiveError(f"collate fails at sample {name}{at}: {format_user_error(cause)}") from cause
        first = get_first_line(error)
        raise ObjectiveError(
            f"samples {names[0]} to {names[-1]} cannot be collated ({first}); pass a function as collate="
        ) from error


def _split_targets(batch: Any) -> tuple[Tree, Tree]:
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, Mapping):
        if names := [name for name in TARGET_KEYS if name in batch]:
            return {key: value for key, value in batch.items() if key != names[0]}, batch[names[0]]
        raise ObjectiveError(
            f"a batch has the keys {', '.join(map(repr, batch))}, but no targets; name the targets 'labels', or pass a "
            "collate= function that returns (inputs, targets)"
        )
    raise ObjectiveError(
        f"a batch must be a pair of inputs and targets, not {type(batch).__name__}; pass a collate= function that "
        "returns (inputs, targets)"
    )


def pad_collate(samples: list[Any]) -> tuple[dict[str, Tensor], Tensor]:
    """Collate sequences of different lengths: pairs of ids [t] and a target.

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
    """Convert floating point to float32 and integers to int64.

    Raises:
        ObjectiveError: the numbers are complex.
    """
    if tensor.is_complex():
        raise ObjectiveError(
            "the data have complex numbers; pass real and imaginary parts, such as torch.view_as_real(x)"
        )
    return tensor.to(torch.float32 if tensor.dtype.is_floating_point else torch.int64)


class MemmapRows:
    """Rows [n, ...] of a memory-mapped array, which are read lazily."""

    def __init__(self, array: np.ndarray[Any, Any], rows: Tensor | None = None) -> None:
        self._array = array
        self._rows = torch.arange(len(array)) if rows is None else rows
        self.shape = (len(self._rows), *array.shape[1:])
        self.dtype = self[:1].dtype

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        read = torch.from_numpy(np.array(self._array[self._rows[rows].numpy()]))  # a copy: the file may be read-only
        return as_input(read)

    def take(self, rows: Tensor) -> MemmapRows:
        """Return the rows at the indices `rows`, without reading them."""
        return MemmapRows(self._array, self._rows[rows])

    def batches(self, size: int = 4096) -> Iterable[Tensor]:
        """Iterate over all rows in order, in batches of `size`."""
        for start in range(0, len(self), size):
            yield self[slice(start, start + size)]


def find_fingerprint(source: Any) -> str | None:
    """Return the fingerprint of a Hugging Face dataset or of a `Subset`; None if the dataset has no fingerprint."""
    if isinstance(source, torch_data.Subset):
        inner = find_fingerprint(source.dataset)
        return None if inner is None else hash_values(inner, list(source.indices))
    own = getattr(source, "fingerprint", None) or getattr(source, "_fingerprint", None)
    return str(own() if callable(own) else own) if own else None


def find_targets(source: Any) -> Any:
    """Return the targets of a torchvision or Hugging Face dataset without loading its samples; None if unavailable."""
    if isinstance(source, torch_data.Subset):
        inner = find_targets(source.dataset)
        return None if inner is None else np.asarray(inner)[np.asarray(source.indices)]
    columns = getattr(source, "column_names", None)
    if isinstance(columns, list):
        names = [name for name in TARGET_KEYS if name in columns]
        return np.asarray(source[names[0]]) if names else None
    return getattr(source, "targets", None)


def fingerprint_files(folder: Path | str, pattern: str = "**/*") -> str:
    """Return a fingerprint of the files of a folder, the same on every machine with these files.

    The fingerprint is the SHA-256 of the names, the sizes, and the first and last 64 KiB of each file.

    Raises:
        ObjectiveError: no file matches `pattern`.
    """
    root = Path(folder)
    try:
        files = sorted(path for path in root.glob(pattern) if path.is_file())
    except (ValueError, NotImplementedError) as error:
        raise ObjectiveError(f"pattern {pattern!r} is invalid ({error}); give one such as '**/*.png'") from None
    if not files:
        raise ObjectiveError(f"no files {pattern} in {folder}")
    found = hashlib.sha256()
    for path in files:
        found.update(f"{path.relative_to(root).as_posix()}:{path.stat().st_size}:".encode())
        with path.open("rb") as file:
            found.update(file.read(_EDGE_BYTES))
            file.seek(max(path.stat().st_size - _EDGE_BYTES, 0))
            found.update(file.read(_EDGE_BYTES))
    return found.hexdigest()


def hash_values(*parts: Any) -> str:
    """Return the hexadecimal SHA-256 of plain values."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def hash_samples(samples: Sequence[Any]) -> str:
    """Return the hexadecimal SHA-256 of samples in memory: nested tensors, arrays, numbers and strings.

    Raises:
        ObjectiveError: a sample contains an object of another type.
    """
    found = hashlib.sha256()
    for number, sample in enumerate(samples):
        try:
            _update_hash(found, sample)
        except TypeError as error:
            raise ObjectiveError(
                f"sample {number} contains a {error}, which cannot be hashed; pass fingerprint=, a text that "
                "identifies the data"
            ) from error
    return found.hexdigest()


def _update_hash(found: Any, value: Any) -> None:
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        array = np.ascontiguousarray(value.detach().cpu().numpy() if isinstance(value, Tensor) else value)
        if array.dtype == object:
            raise TypeError("array of objects")
        found.update(f"{array.dtype}:{array.shape}:".encode())
        found.update(array.data)
    elif isinstance(value, Mapping):
        for key in value:
            found.update(f"{key!r}=".encode())
            _update_hash(found, value[key])
    elif isinstance(value, (tuple, list)):
        found.update(f"{len(value)}(".encode())
        for item in value:
            _update_hash(found, item)
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        found.update(f"{value!r};".encode())
    else:
        raise TypeError(type(value).__name__)
