"""Replace files in folders that other users may be able to change.

Nothing is found by path twice: another user could replace a part of the path by a link in between. Folders are opened
part by part, and files are created, replaced and removed in the opened folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_MAX_LINKS = 40  # as in Linux
_SEARCH = getattr(os, "O_PATH", getattr(os, "O_SEARCH", os.O_RDONLY))  # Linux, macOS, others
_FOLDER_FLAGS = _SEARCH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def open_parent(path: Path) -> Iterator[tuple[int, str]]:
    """Yield a descriptor of the folder that contains a file, and the name of the file in it; links are followed.

    Args:
        path: path of the file, which need not exist.

    Raises:
        PermissionError: a link in the path belongs to another user, who could choose any file of this user.
        OSError: a folder does not exist or cannot be opened, or the links form a loop.
    """
    names, links = [*path.absolute().parts[1:]], 0
    folder = os.open(path.absolute().anchor, _FOLDER_FLAGS)
    try:
        while names:
            name = names.pop(0)
            status = stat_file(name, folder)
            if status is not None and stat.S_ISLNK(status.st_mode):
                links += 1
                if status.st_uid not in (0, os.geteuid()):
                    fault = f"{name!r} is a link of another user; give the path without this link"
                    raise PermissionError(errno.EACCES, fault, str(path))
                if links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
                target = Path(os.readlink(name, dir_fd=folder))
                names = [*target.parts, *names]
                if not target.is_absolute():
                    continue
                name = names.pop(0)
            elif not names:
                yield folder, name
                return
            try:
                inner = os.open(name, _FOLDER_FLAGS, dir_fd=folder)
            except OSError as error:
                error.filename = str(path)
                raise
            os.close(folder)
            folder = inner
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    finally:
        os.close(folder)


def stat_file(name: str, folder: int) -> os.stat_result | None:
    """Return the status of an entry of an open folder, without following links; None if it does not exist."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def create_file(name: str, folder: int, *, mode: int = 0o600) -> IO[bytes]:
    """Create a file in an open folder, and return it open for reading and writing."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(name, flags, mode, dir_fd=folder), "w+b")


def remove_file(name: str, folder: int) -> None:
    """Remove a file of an open folder, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


@contextlib.contextmanager
def replacement(path: Path) -> Iterator[IO[bytes]]:
    """Yield an open temporary file that replaces `path` at the end; after an error, `path` is unchanged.

    The target of a link is replaced, and the permissions are kept. A device or a pipe is yielded itself.

    Raises:
        OSError: an existing file is not writable or belongs to another user, or the new file cannot be created.
    """
    with open_parent(path) as (folder, name):
        status = stat_file(name, folder)
        if status is not None and not stat.S_ISREG(status.st_mode):
            with _open_device(name, folder) as device:
                yield device
            return
        if status is not None:
            os.close(os.open(name, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW, dir_fd=folder))
            if status.st_uid not in (0, os.geteuid()):
                raise PermissionError(errno.EACCES, "it belongs to another user", str(path))
        temporary = f".{uuid.uuid4().hex}.tmp"
        try:
            with create_file(temporary, folder, mode=0o666 if status is None else 0o600) as file:
                yield file
                if status is not None:
                    _copy_permissions(status, file.fileno())
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            remove_file(temporary, folder)


def _copy_permissions(status: os.stat_result, descriptor: int) -> None:
    """Give a file the group and the mode of another one, without the bits of a program that runs as its owner."""
    mode = status.st_mode & 0o777
    if os.fstat(descriptor).st_gid != status.st_gid:
        try:
            os.fchown(descriptor, -1, status.st_gid)
        except OSError:  # this user is not in the group
            mode &= ~0o070
    os.fchmod(descriptor, mode)


def _open_device(name: str, folder: int) -> IO[bytes]:
    """Open a device or a pipe of an open folder for writing."""
    descriptor = os.open(name, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=folder)  # fails without a reader
    status = os.fstat(descriptor)
    is_foreign_pipe = stat.S_ISFIFO(status.st_mode) and status.st_uid not in (0, os.geteuid())
    if is_foreign_pipe or stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        fault = "it is a pipe of another user" if is_foreign_pipe else "another process has replaced it"
        raise PermissionError(errno.EACCES, fault, name)
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "wb")
