"""Checkpoint files: write, verify, read; in one file or in shards."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import struct
from pathlib import Path
from typing import Any

import torch

_LABEL = b"sha256:"
_COMMENT = len(_LABEL) + 64
_CHUNK = 1 << 20


class CheckpointError(Exception):
    """A checkpoint file that cannot be trusted: torn, changed, or not one of ours."""


def write(path: Path, state: dict[str, Any], *, synced: bool = True) -> None:
    """Writes plain values and tensors to `path`: the old file stays until the new one is complete.

    Args:
        path: the file.
        state: plain values and tensors.
        synced: whether it outlives a power cut from here on, and not only the process.

    Raises:
        OSError: the disk is full, or the like.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _save(state, temporary)
        with temporary.open("r+b") as file:
            digest = _digest(file, size := temporary.stat().st_size)
            # The archive ends with its comment and, before it, the comment's length in two bytes.
            file.seek(size - 2)
            file.write(struct.pack("<H", _COMMENT) + _LABEL + digest)
            file.flush()
            if synced:
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if synced:
        _sync_folder(path.parent)


def _save(state: dict[str, Any], path: Path) -> None:
    try:
        with path.open("wb") as file:
            torch.save(state, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # torch speaks of an unexpected position when the disk is full
            raise error.__context__ from None
        raise


def read(path: Path) -> dict[str, Any]:
    """The state that `write` wrote, on the CPU.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is torn or changed, or holds anything but plain values and tensors.
    """
    _verify(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{path} holds more than plain values and tensors: it is not loaded") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is not a checkpoint: it holds a {type(state).__name__}")
    return state


def remove_leftovers(folder: Path) -> None:
    """Removes what a process that was killed in `write` left half written."""
    for path in folder.glob(".*.pt.*.tmp"):
        path.unlink(missing_ok=True)


def _verify(path: Path) -> None:
    size = path.stat().st_size - _COMMENT
    with path.open("rb") as file:
        if size > 2:
            file.seek(size)
            comment = file.read()
            file.seek(0)
            if comment == _LABEL + _digest(file, size):
                return
    raise CheckpointError(f"{path} is torn or was changed: its checksum does not fit")


def _digest(file: Any, size: int) -> bytes:
    """Hexadecimal SHA-256 over the archive without the two bytes of the comment's length."""
    digest, left = hashlib.sha256(), size - 2
    while left > 0 and (chunk := file.read(min(_CHUNK, left))):
        digest.update(chunk)
        left -= len(chunk)
    return digest.hexdigest().encode()


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself durable, where folders can be synced."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


FOLDER = "shards"  # of a run directory


def entry(path: Path) -> dict[str, Any]:
    """What a manifest says of a file."""
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def require_written(state: dict[str, Any]) -> None:
    """Refuses a state whose parts were not written.

    Raises:
        OSError: the disk is full, or the like.
    """
    if (reason := state.get("shards", {}).get("failed")) is not None:
        raise OSError(reason)


def located(state: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """A state that was read from a run directory, with the path of the folder that its parts are in."""
    if "shards" not in state:
        return state
    folder = run_dir / FOLDER / Path(state["shards"]["folder"]).name
    return {**state, "shards": {**state["shards"], "folder": str(folder.resolve())}}


def verified(state: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """The same, once all parts are found to be what the manifest says.

    Raises:
        CheckpointError: one is gone, torn or changed.
    """
    state = located(state, run_dir)
    for name, expected in state.get("shards", {}).get("files", {}).items():
        path = Path(state["shards"]["folder"], name)
        try:
            if entry(path) == expected:
                continue
        except FileNotFoundError:
            raise CheckpointError(f"{path} is gone: its checkpoint is of no use") from None
        raise CheckpointError(f"{path} is torn or was changed: its checksum does not fit")
    return state


def remove_unnamed(run_dir: Path) -> None:
    """Removes the parts that no checkpoint in a run directory names."""
    folder = run_dir / FOLDER
    if not folder.is_dir():
        return
    named = {_named(path) for path in run_dir.glob("*.pt")}
    left = [part for part in folder.iterdir() if part.name in named]
    for part in folder.iterdir() if left else [folder]:
        if part not in left:
            shutil.rmtree(part, ignore_errors=True)


def _named(path: Path) -> str | None:
    """The folder of parts that a checkpoint names; its tensors are not read."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return str(state["shards"]["folder"]) if "shards" in state else None
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError):  # torn: of no use, nor are its parts
        return None
