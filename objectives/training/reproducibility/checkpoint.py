"""Write, verify and read checkpoints, in one file or in shards."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import struct
import tempfile
import time
import warnings
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from hpsearch.kill_points import kill_point
from hpsearch.objectives.errors import ObjectiveError, is_out_of_memory
from hpsearch.objectives.training.reproducibility.loaded_state import find_replaced_method

log = logging.getLogger("hpsearch.objectives.training")

_LABEL = b"sha256:"
_COMMENT_SIZE = len(_LABEL) + 64
_CHUNK = 1 << 20


class CheckpointError(Exception):
    """Error for an invalid checkpoint file: truncated, changed, or not written by hpsearch."""


def write(path: Path, state: dict[str, Any], *, synced: bool = True) -> None:
    """Write plain values and tensors to `path` atomically; with `synced`, the file survives a power failure.

    Raises:
        OSError: the file cannot be written, for example because the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _save(state, temporary)
        with temporary.open("r+b") as file:
            digest = _digest(file, size := temporary.stat().st_size)
            # The archive ends with its comment and, before it, the comment's length in two bytes.
            file.seek(size - 2)
            file.write(struct.pack("<H", _COMMENT_SIZE) + _LABEL + digest)
            file.flush()
            if synced:
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if synced:
        _sync_folder(path.parent)


@kill_point("write checkpoint file")
def _save(state: dict[str, Any], path: Path) -> None:
    try:
        with path.open("wb") as file:
            torch.save(state, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # torch hides the cause, such as a full disk
            raise error.__context__ from None
        raise


def read(path: Path) -> dict[str, Any]:
    """Return the state that `write` wrote, on the CPU.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointError: the file is truncated or changed, or contains objects other than plain values and tensors.
        ObjectiveError: the path is a folder, or the user may not read it.
    """
    try:
        _verify(path)
    except (IsADirectoryError, PermissionError) as error:
        raise ObjectiveError(f"{path} cannot be read ({error.strerror}); remove it, or use another folder") from None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=False)
    except OSError:
        raise
    except Exception as error:  # of the classes that the user has allowed, too
        if is_out_of_memory(error):
            raise
        raise CheckpointError(f"{path} contains other objects than plain values and tensors") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is not a checkpoint: it contains a {type(state).__name__}")
    if (replaced := find_replaced_method(state)) is not None:
        raise CheckpointError(
            f"{path} may be manipulated: attributes of {replaced or 'the state'} replace methods of its class"
        )
    return state


def check_readable(state: dict[str, Any]) -> None:
    """Reject a state that :func:`read` cannot load.

    Raises:
        ObjectiveError: the state contains objects other than plain values and tensors, such as a subclass of a tensor.
    """
    if (replaced := find_replaced_method(state)) is not None:
        raise ObjectiveError(
            f"a checkpoint cannot store {replaced or 'the state'}: its attributes replace methods of its class; remove "
            "these attributes"
        )
    if (found := _find_unreadable(state, "")) is None:
        return
    name, part = found
    raise ObjectiveError(
        f"a checkpoint cannot store {name or 'the state'} (type {type(part).__name__}), because it could not be read "
        "again; use plain values and tensors of PyTorch's own classes"
    )


def _find_unreadable(tree: Any, name: str) -> tuple[str, Any] | None:
    """Return path and value of the smallest unreadable part of a tree; None if all parts are readable."""
    if is_readable(tree):
        return None
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    for key, part in items:
        if (found := _find_unreadable(part, f"{name}.{key}" if name else str(key))) is not None:
            return found
    return name, tree


def _find_types(tree: Any) -> set[type]:
    """Return the types of all parts of a tree, which include keys."""
    found, waiting = set[type](), [tree]
    seen = set[int]()  # ids of containers, which a tree can contain several times
    while waiting:
        part = waiting.pop()
        found.add(type(part))
        if isinstance(part, (Mapping, tuple, list)) and id(part) not in seen:
            seen.add(id(part))
            waiting += (*part.keys(), *part.values()) if isinstance(part, Mapping) else part
    return found


def is_readable(tree: Any) -> bool:
    """Return whether :func:`read` can load a part of a state; True if the disk or memory is too full to find out."""
    for has_data in (False, True):  # quantized and nested tensors cannot be loaded without their data
        try:
            with tempfile.TemporaryFile() as file, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with nullcontext() if has_data else torch.serialization.skip_data():
                    torch.save(tree, file)
                file.seek(0)
                torch.load(file, map_location="cpu" if has_data else "meta", weights_only=True, mmap=False)
        except OSError:
            return True
        except Exception as error:  # of the methods of any object
            if isinstance(error.__context__, OSError) or is_out_of_memory(error):
                return True
        else:
            return True
    return False


def _verify(path: Path) -> None:
    size = path.stat().st_size - _COMMENT_SIZE
    with path.open("rb") as file:
        if size > 2:
            file.seek(size)
            comment = file.read()
            file.seek(0)
            if comment == _LABEL + _digest(file, size):
                return
    raise CheckpointError(f"{path} is truncated or changed: its checksum differs")


def _is_complete_on_disk(path: Path) -> bool:
    """Return whether a checkpoint can be read without the cache of the system; False if the system has no such way."""
    try:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        _verify(path)
    except (AttributeError, OSError, CheckpointError):
        return False
    return True


def _digest(file: Any, size: int) -> bytes:
    """Return the hexadecimal SHA-256 of the archive without the two bytes of the comment's length."""
    digest, left = hashlib.sha256(), size - 2
    while left > 0 and (chunk := file.read(min(_CHUNK, left))):
        digest.update(chunk)
        left -= len(chunk)
    return digest.hexdigest().encode()


def _sync_folder(folder: Path) -> None:
    """Make a rename in the folder durable, if the file system can sync folders."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


SHARDS_FOLDER = "shards"  # folder in a run directory


def describe_file(path: Path) -> dict[str, Any]:
    """Return size and SHA-256 of a file, for a manifest."""
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def require_complete_shards(state: dict[str, Any]) -> None:
    """Reject a state whose shards could not be written.

    Raises:
        OSError: a shard could not be written, for example because the disk is full.
    """
    if (reason := state.get("shards", {}).get("failed")) is not None:
        raise OSError(reason)


class RunFiles:
    """Checkpoint files of a run directory: `last.pt` and its predecessors, `best.pt`, snapshots and shards.

    Args:
        run_dir: the directory.
        keep: number of checkpoints to keep for resuming, including `last.pt`. With two or more, a run can resume if
            one file is truncated.
        snapshot_every: epochs between permanent checkpoints, such as `epoch-0009.pt`; None writes none of these.
        synced: whether saved files survive a power failure; if False, they survive only the end of the process.
    """

    def __init__(self, run_dir: Path, *, keep: int = 2, snapshot_every: int | None = None, synced: bool = True) -> None:
        self.run_dir = Path(run_dir)
        self.last_path = self.run_dir / "last.pt"
        self.previous_path = self.run_dir / "previous.pt"
        self.best_path = self.run_dir / "best.pt"
        self.shards = self.run_dir / SHARDS_FOLDER
        earlier = [self.previous_path, *(self.run_dir / f"previous-{n}.pt" for n in range(2, keep))][: keep - 1]
        self._kept = [self.last_path, *earlier]
        self._snapshot_every, self._synced = snapshot_every, synced
        self._saved_at = time.monotonic()
        self._checked_types: set[type] = set()  # of the parts of states that passed `check_readable`

    def restore(self) -> dict[str, Any] | None:
        """Return the newest valid state, or None; truncated or changed files are skipped with a warning."""
        self.remove_leftovers()
        self.remove_unreferenced_shards()
        has_invalid = False
        for path in self._kept:
            try:
                return self._check_shards(self.read(path))
            except FileNotFoundError:
                continue
            except CheckpointError as error:
                has_invalid = True
                log.warning("%s; trying the previous checkpoint", error)
        if has_invalid:
            log.warning("no valid checkpoint in %s; the run starts from the beginning", self.run_dir)
        return None

    def read(self, path: Path) -> dict[str, Any]:
        """Return the state in one of the files, with the absolute path of the folder of its shards.

        Raises:
            FileNotFoundError: the file does not exist.
            CheckpointError: the file is truncated or changed, or contains objects other than plain values and tensors.
        """
        state = read(path)
        if "shards" not in state:
            return state
        folder = self.shards / Path(state["shards"]["folder"]).name
        return {**state, "shards": {**state["shards"], "folder": str(folder.resolve())}}

    def _check_shards(self, state: dict[str, Any]) -> dict[str, Any]:
        for name, expected in state.get("shards", {}).get("files", {}).items():
            path = Path(state["shards"]["folder"], name)
            if not path.exists():
                raise CheckpointError(f"{path}, a part of the checkpoint, is missing")
            if describe_file(path) != expected:
                raise CheckpointError(f"{path} is truncated or changed: its checksum differs")
        return state

    @kill_point("save checkpoint")
    def save(self, state: dict[str, Any], *, best: bool, last: bool = True) -> None:
        """Write the state after an epoch: `best.pt` if the epoch is the best, a snapshot if it is due, and `last.pt`.

        Raises:
            OSError: a file cannot be written, for example because the disk is full.
            ObjectiveError: the state could not be read again.
        """
        self._check_new_types(state)
        if best:
            self.write_best(state)
        require_complete_shards(state)
        done = len(state.get("history", ()))
        if self._snapshot_every and done % self._snapshot_every == 0:
            write(self.run_dir / f"epoch-{done - 1:04d}.pt", state, synced=self._synced)
        if last:
            self._write_last(state)
        else:
            self.remove_unreferenced_shards()

    def save_last(self, state: dict[str, Any]) -> None:
        """Write `last.pt`, and keep its predecessors.

        Raises:
            OSError: a file cannot be written, for example because the disk is full.
            ObjectiveError: the state could not be read again.
        """
        self._check_new_types(state)
        require_complete_shards(state)
        self._write_last(state)

    def _write_last(self, state: dict[str, Any]) -> None:
        for newer, older in reversed(list(pairwise(self._kept))):
            if newer.exists():
                newer.replace(older)
        write(self.last_path, state, synced=self._synced)
        self.remove_unreferenced_shards()
        self._saved_at = time.monotonic()

    def _check_new_types(self, state: dict[str, Any]) -> None:
        """Check a state that contains types which no earlier state had."""
        if not self._checked_types.issuperset(types := _find_types(state)):
            check_readable(state)
            self._checked_types |= types

    def is_due(self, save_every: float | None) -> bool:
        """Return whether `save_every` seconds have passed since `last.pt` was written; False if it is None."""
        return save_every is not None and time.monotonic() >= self._saved_at + save_every

    def write_best(self, state: dict[str, Any]) -> None:
        """Write `best.pt` from the best epoch in a state."""
        write(self.best_path, promotable(state), synced=self._synced)

    def sync_best(self) -> None:
        """Make `best.pt` durable, so that it survives a power failure. An error is logged if the file is complete.

        Raises:
            OSError: the file could not be written to the disk.
        """
        if not self.best_path.exists():
            return
        try:
            with self.best_path.open("rb") as file:
                os.fsync(file.fileno())
            _sync_folder(self.run_dir)
        except OSError as error:  # such as a quota; the system may have discarded the data that it could not write
            if not _is_complete_on_disk(self.best_path):
                raise
            log.warning("%s may not survive a power failure (%s)", self.best_path, error.strerror)

    def remove(self, *paths: Path) -> None:
        """Remove files of the directory, if they exist, and shards that no other checkpoint references."""
        for path in paths:
            path.unlink(missing_ok=True)
        self.remove_unreferenced_shards()

    def remove_leftovers(self) -> None:
        """Remove temporary files of a process that was killed while it wrote a file."""
        for pattern in (".*.pt.*.tmp", ".config.yaml.tmp", ".changes.diff.tmp"):
            for path in self.run_dir.glob(pattern):
                if not path.is_dir():
                    path.unlink(missing_ok=True)

    def remove_unreferenced_shards(self) -> None:
        """Remove the shards that no checkpoint in the directory references."""
        if self.shards.is_symlink() or not self.shards.is_dir():
            return
        try:
            referenced = {_read_shard_folder(path) for path in self.run_dir.glob("*.pt")}
        except Exception:  # an unreadable file may be valid
            return
        kept = [part for part in self.shards.iterdir() if part.name in referenced]
        for part in self.shards.iterdir() if kept else [self.shards]:
            if part not in kept:
                shutil.rmtree(part, ignore_errors=True)


def promotable(state: dict[str, Any]) -> dict[str, Any]:
    """Return the content of `best.pt`: the best weights of a full state and their scores, without the optimizer."""
    kept = ("format", "objective", "config", "seed", "split_seed", "split_hash")
    more = (key for key in ("refit", "folds") if key in state)
    return {**{key: state[key] for key in (*kept, *more)}, **state["best"]}


def _read_shard_folder(path: Path) -> str | None:
    """Return the name of a checkpoint's shard folder without reading tensors; None if there are no shards."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return str(state["shards"]["folder"]) if "shards" in state else None
    except FileNotFoundError:
        return None
    except Exception as error:  # also of the classes that the user has allowed
        if isinstance(error, OSError) or is_out_of_memory(error):
            raise
        return None  # the file is invalid and cannot be restored
