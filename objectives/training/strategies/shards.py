"""Sharded checkpoints by torch.distributed.checkpoint: each rank writes and reads its own shards."""

from __future__ import annotations

import pickle
import shutil
import uuid
import warnings
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, ClassVar

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


def count_shard_bytes(value: Any) -> int:
    """Return the bytes of all sharded tensors in a state, over all ranks."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tensors(value) if isinstance(tensor, DTensor))


def should_shard(parts: dict[str, Any], above_gib: float) -> bool:
    """Return whether a checkpoint of a state is sharded: the sharded tensors exceed `above_gib` GiB."""
    return count_shard_bytes(parts) > above_gib * 2**30


@kill_point("write shards")
def write_shards(parts: dict[str, Any], shards_dir: Path, ranks: Ranks) -> dict[str, Any] | None:
    """Write each rank's sharded tensors to a new folder in `shards_dir`.

    Returns:
        The state with empty tensors instead of the sharded tensors, and the manifest, which contains the reason if
        writing failed. None if not all ranks see the files of rank 0, because the ranks run on several machines.
    """
    folder = shards_dir / ranks.broadcast_object(uuid.uuid4().hex[:12])
    failed = ranks.run_on_rank_zero(lambda: _make(folder))  # before the other ranks check that it exists
    seen = ranks.all_gather_object(folder.is_dir())
    if not all(seen) and seen[0]:
        if ranks.is_rank_zero:
            folder.rmdir()
        return None
    sharded: dict[str, Tensor] = {}
    state: dict[str, Any] = _extract_shards(parts, "", sharded)
    files: dict[str, dict[str, Any]] = {}
    if seen[0]:
        try:
            save(sharded, storage_writer=FileSystemWriter(folder), process_group=ranks.cpu_group)
            own = [*folder.glob(f"__{ranks.rank}_*"), *([folder / ".metadata"] if ranks.is_rank_zero else [])]
            files = {path.name: checkpoint.describe_file(path) for path in own}
        except (CheckpointException, OSError) as error:
            failed = _reason(error)
    found = ranks.all_gather_object((failed, files))
    manifest: dict[str, Any] = {"folder": folder.name, "files": {k: v for _, each in found for k, v in each.items()}}
    if reasons := [reason for reason, _ in found if reason is not None]:
        manifest["failed"] = reasons[0]
        if ranks.is_rank_zero:
            shutil.rmtree(folder, ignore_errors=True)  # the disk may be full
    return {**state, "shards": manifest}


def _make(folder: Path) -> str | None:
    """Create a folder; return None, or the reason if this fails."""
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        return str(error)
    return None


def _extract_shards(value: Any, name: str, sharded: dict[str, Tensor]) -> Any:
    """Return `value` with empty tensors instead of sharded tensors; add the sharded tensors to `sharded` by path."""
    if isinstance(value, DTensor):
        sharded[name] = value.detach()
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, Mapping):
        return {key: _extract_shards(inner, f"{name}/{key}", sharded) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_extract_shards(inner, f"{name}/{n}", sharded) for n, inner in enumerate(value))
    return value


def read_shards(parts: dict[str, Any], folder: Path, like: Any = None, ranks: Ranks | None = None) -> dict[str, Any]:
    """Read the tensors that `write_shards` wrote, on any number of ranks.

    Args:
        parts: the state with empty tensors instead of the sharded tensors.
        folder: folder of the files, which are already checked against the manifest.
        like: this rank's tensors, by the keys of the state. Tensors without a sharded entry in `like` are read whole.
        ranks: ranks that read together; None if only this process reads.

    Raises:
        RuntimeError: the files lack a part of the state.
    """
    empty: dict[str, Tensor] = {}
    state: dict[str, Any] = _allocate_shards(parts, "", like, empty)
    try:
        group = None if ranks is None else ranks.cpu_group
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # reading in a single process is intended
            load(empty, storage_reader=_Reader(folder), process_group=group, no_dist=ranks is None)
    except CheckpointException as error:
        raise RuntimeError(_reason(error)) from error
    return state


def _allocate_shards(value: Any, name: str, like: Any, empty: dict[str, Tensor]) -> Any:
    """Return `value` with allocated tensors instead of empty tensors; add the allocated tensors to `empty` by path."""
    if isinstance(value, Tensor) and value.is_meta:
        if isinstance(like, DTensor) and like.shape == value.shape:
            empty[name] = torch.empty_like(like, dtype=value.dtype)
        else:
            empty[name] = torch.empty(value.shape, dtype=value.dtype)
        return empty[name]
    if isinstance(value, Mapping):
        below = {key: like[key] if isinstance(like, Mapping) and key in like else like for key in value}
        return {key: _allocate_shards(inner, f"{name}/{key}", below[key], empty) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_allocate_shards(inner, f"{name}/{n}", like, empty) for n, inner in enumerate(value))
    return value


class _Reader(FileSystemReader):
    """FileSystemReader that unpickles only the types that occur in the metadata of shards."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002 torch's
        with Path(self.path, ".metadata").open("rb") as file:
            metadata: Metadata = _MetadataUnpickler(file).load()
        for info in (metadata.storage_data or {}).values():
            if Path(info.relative_path).name != str(info.relative_path):
                raise pickle.UnpicklingError(f"shard {str(info.relative_path)!r} is not in the folder of the metadata")
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle._Unpickler):  # the unpickler in C has no way to check BUILD
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def load_build(self) -> None:
        """Set attributes of an object: of a class or an enumeration, this would change the whole process."""
        target = type(self.stack[-2])  # type: ignore[attr-defined]
        if (target.__module__, target.__name__) not in _TYPES or not is_dataclass(target):
            raise pickle.UnpicklingError(f"attributes of {target.__name__} are not allowed in the metadata of shards")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":  # the name of the module in Python 3.13
            module = "pathlib"
        is_torch_type = module == "torch" and isinstance(getattr(torch, name, None), _TORCH_TYPES)
        if (module, name) not in _TYPES and not is_torch_type:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in the metadata of shards")
        return super().find_class(module, name)


_TORCH_TYPES = (torch.dtype, torch.layout)
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
    """Return an error of torch as one line; if several ranks failed, the error of the first of them."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return " ".join(str(error).split())[:300] or type(error).__name__
