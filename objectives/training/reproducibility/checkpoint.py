"""Checkpoint files: written whole or not at all, checked when read, and never code.

A file is what `torch.save` writes, an archive of plain values and tensors, with its SHA-256 in the archive's comment:
`torch.load(path, weights_only=True)` reads it too.
"""

from __future__ import annotations

import hashlib
import os
import pickle
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
