"""Files: atomic writes, locks, hashes and sizes."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import uuid
from pathlib import Path


def write_private(path: Path, text: str) -> None:
    """Write `text` to `path` for this user alone (0600): after a crash the file is the old one or the new one."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:  # also Ctrl-C leaves no temporary file
        Path(temporary).unlink(missing_ok=True)
        raise


def place(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source`, or a copy where there can be no link; durable when this returns."""
    make_folder(target.parent)
    with source.open("rb") as file:
        os.fsync(file.fileno())  # costs nothing where it was done before
    try:
        os.link(source, target)
    except OSError as error:  # another file system, one without links, or the name is taken
        if isinstance(error, FileNotFoundError):  # somebody removed the folder, for it was empty
            make_folder(target.parent)
        _copy(source, target)
    sync_folder(target.parent)


def _copy(source: Path, target: Path) -> None:
    # It begins like the target, so that whoever clears away the target's kind finds it.
    temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with source.open("rb") as reader, temporary.open("xb") as writer:
            shutil.copyfileobj(reader, writer, 1 << 20)
            writer.flush()
            os.fsync(writer.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source`, or a copy on a file system without links; raises FileNotFoundError."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)


def append_whole(descriptor: int, data: bytes, size: int) -> None:
    """Append all of `data` to an open file of `size` bytes, or nothing.

    Raises:
        OSError: the disk is full, or the file cannot be written; the file is unchanged.
    """
    written = 0
    try:
        while written < len(data):
            written += os.write(descriptor, data[written:])
    except OSError:
        os.ftruncate(descriptor, size)  # a torn record would hide those behind it
        raise


def lock_file(path: Path) -> int | None:
    """Lock a file, which is created if it is missing.

    A file system without locks admits every process.

    Returns:
        The descriptor, which holds the lock until it is closed; None if another process holds the lock.

    Raises:
        OSError: the file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:  # no locks here
        pass
    return descriptor


def make_folder(path: Path) -> None:
    """Create a folder and its parents, durably."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Make what was created, renamed or removed in a folder durable, where folders can be synced."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def size_of(folder: Path) -> int:
    """Return the bytes of all files below a folder; what others remove meanwhile counts for nothing."""
    size = 0
    for parent, _, names in os.walk(folder):  # which, unlike Path.rglob, does not mind a folder that goes
        for name in names:
            with contextlib.suppress(OSError):
                size += Path(parent, name).lstat().st_size
    return size
