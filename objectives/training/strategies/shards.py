"""A state in parts: each rank writes what it has, and reads what it is to have, by torch.distributed.checkpoint."""

from __future__ import annotations

import pickle
import shutil
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from hpsearch.kill_points import kill_point
from hpsearch.objectives.training.data.tree import tensors
from hpsearch.objectives.training.ranks import Ranks
from hpsearch.objectives.training.reproducibility import checkpoint


def size(value: Any) -> int:
    """Return the bytes of all sharded tensors in a state, over all ranks."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tensors(value) if isinstance(tensor, DTensor))


@kill_point("write shards")
def write(parts: dict[str, Any], place: Path, ranks: Ranks) -> dict[str, Any] | None:
    """Write each rank's sharded tensors to a new folder in `place`.

    Returns:
        The state with empty tensors in their place, and the manifest, which has the reason if writing failed. None if
        not all ranks see rank 0's files, because they are on several machines.
    """
    folder = place / ranks.told(uuid.uuid4().hex[:12])
    failed = ranks.led(lambda: _make(folder))  # before any rank checks whether it exists
    seen = ranks.each(folder.is_dir())
    if not all(seen) and seen[0]:
        if ranks.first:
            folder.rmdir()
        return None
    sharded: dict[str, Tensor] = {}
    left: dict[str, Any] = _outlined(parts, "", sharded)
    files: dict[str, dict[str, Any]] = {}
    if seen[0]:
        try:
            save(sharded, storage_writer=FileSystemWriter(folder), process_group=ranks.control)
            own = [*folder.glob(f"__{ranks.rank}_*"), *([folder / ".metadata"] if ranks.first else [])]
            files = {path.name: checkpoint.entry(path) for path in own}
        except (CheckpointException, OSError) as error:
            failed = _reason(error)
    found = ranks.each((failed, files))
    manifest: dict[str, Any] = {"folder": folder.name, "files": {k: v for _, each in found for k, v in each.items()}}
    if reasons := [reason for reason, _ in found if reason is not None]:
        manifest["failed"] = reasons[0]
        if ranks.first:
            shutil.rmtree(folder, ignore_errors=True)  # the disk may be full
    return {**left, "shards": manifest}


def _make(folder: Path) -> str | None:
    """Make a folder; return the reason if that fails."""
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        return str(error)
    return None


def _outlined(value: Any, name: str, sharded: dict[str, Tensor]) -> Any:
    """A value without what is sharded in it, which is added to `sharded` by its place."""
    if isinstance(value, DTensor):
        sharded[name] = value.detach()
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, Mapping):
        return {key: _outlined(inner, f"{name}/{key}", sharded) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_outlined(inner, f"{name}/{n}", sharded) for n, inner in enumerate(value))
    return value


def read(parts: dict[str, Any], folder: Path, like: Any = None, ranks: Ranks | None = None) -> dict[str, Any]:
    """Read the tensors that `write` wrote, on any number of ranks.

    Args:
        parts: the state without them.
        folder: of the files, which were checked against the manifest.
        like: this rank's tensors, by the keys of the state. Other tensors are read whole.
        ranks: the ranks that read together; None is this process alone.

    Raises:
        RuntimeError: the files lack a part of the state.
    """
    empty: dict[str, Tensor] = {}
    state: dict[str, Any] = _emptied(parts, "", like, empty)
    try:
        group = None if ranks is None else ranks.control
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that one process reads alone, which is meant
            load(empty, storage_reader=_Reader(folder), process_group=group, no_dist=ranks is None)
    except CheckpointException as error:
        raise RuntimeError(_reason(error)) from error
    return state


def _emptied(value: Any, name: str, like: Any, empty: dict[str, Tensor]) -> Any:
    """A state with room for the tensors that have no values, which is added to `empty` by its place."""
    if isinstance(value, Tensor) and value.is_meta:
        if isinstance(like, DTensor) and like.shape == value.shape:
            empty[name] = torch.empty_like(like, dtype=value.dtype)
        else:
            empty[name] = torch.empty(value.shape, dtype=value.dtype)
        return empty[name]
    if isinstance(value, Mapping):
        below = {key: like[key] if isinstance(like, Mapping) and key in like else like for key in value}
        return {key: _emptied(inner, f"{name}/{key}", below[key], empty) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_emptied(inner, f"{name}/{n}", like, empty) for n, inner in enumerate(value))
    return value


class _Reader(FileSystemReader):
    """Torch's, but for the table of what is where: a pickle, of which nothing but that table's own types is loaded."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002 torch's
        with Path(self.path, ".metadata").open("rb") as file:
            metadata: Metadata = _Table(file).load()
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata


class _Table(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _TYPES and not (module == "torch" and isinstance(getattr(torch, name, None), _PLAIN)):
            raise pickle.UnpicklingError(f"{module}.{name} is in no table of shards")
        return super().find_class(module, name)


_PLAIN = (torch.dtype, torch.layout)
_TYPES = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex")
    ),
    *(("torch.distributed.checkpoint.metadata", name) for name in ("StorageMeta", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(("pathlib", name) for name in ("PosixPath", "WindowsPath")),
}


def _reason(error: BaseException) -> str:
    """What an error of torch's says in a line: the first of those of all ranks."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return " ".join(str(error).split())[:300] or type(error).__name__
