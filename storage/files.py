"""Files: private files, locks, hashes and sizes."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import unicodedata
import uuid
from pathlib import Path


def write_private(path: Path, text: str) -> None:
    """Write `text` to `path` atomically, with mode 0600."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:  # includes KeyboardInterrupt
        Path(temporary).unlink(missing_ok=True)
        raise


def link_or_copy_durably(source: Path, target: Path) -> None:
    """Create `target` as a hard link to `source`, or as a copy if no link is possible, and sync `target` to disk."""
    make_folder(target.parent)
    with source.open("rb") as file:
        os.fsync(file.fileno())
    try:
        os.link(source, target)
    except OSError as error:  # another file system, no support for links, or an existing target
        if isinstance(error, FileNotFoundError):  # another process removed the empty folder
            make_folder(target.parent)
        _copy(source, target)
    fsync_folder(target.parent)


def _copy(source: Path, target: Path) -> None:
    # The temporary name starts with the name of the target, so that a cleanup by a prefix of the target finds it too.
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
    """Create `target` as a hard link to `source`, or as a copy; raises FileNotFoundError if `source` is missing."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)


def append_atomically(descriptor: int, data: bytes, size: int) -> None:
    """Append all of `data` to an open file of `size` bytes, or nothing.

    Raises:
        OSError: the disk is full, or the file cannot be written; its content is unchanged.
    """
    written = 0
    try:
        while written < len(data):
            written += os.write(descriptor, data[written:])
    except OSError:
        os.ftruncate(descriptor, size)  # a truncated record would make later ones unreadable
        raise


def lock_file(path: Path) -> int | None:
    """Lock a file, and create it if it is missing.

    On a file system without locks, every process gets the lock.

    Returns:
        The file descriptor, which holds the lock until it is closed; None if another process holds the lock.

    Raises:
        OSError: the file cannot be opened, or is a link, which another user can place in a shared folder.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:  # the file system has no locks
        pass
    return descriptor


def make_folder(path: Path) -> None:
    """Create a folder and its parents, and sync them to disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        fsync_folder(folder.parent)


def fsync_folder(path: Path) -> None:
    """Sync the entries of a folder to disk, if the file system supports it."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


_TAIL_BYTES = 1_000_000
_TAIL_CHARACTERS = 1_000


def read_last_lines(path: Path) -> list[str]:
    """Return the lines in the last megabyte of a log file without empty lines; empty if the file cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
            text = file.read(_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()]


def read_tail(path: Path, *, lines: int = 1) -> str:
    """Return the last lines of a log file, joined to one line of at most 1,000 characters."""
    return " ".join(line.strip() for line in read_last_lines(path)[-lines:])[-_TAIL_CHARACTERS:]


def compute_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def compute_folder_sha256(folder: Path) -> str:
    """Return the SHA-256 of all files below a folder: of the lines that ``sha256sum`` prints, sorted by path."""
    files = sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*") if not path.is_dir())
    lines = "".join(_format_checksum(compute_sha256(path), name) for name, path in files)
    return hashlib.sha256(lines.encode()).hexdigest()


def _format_checksum(sha256: str, name: str) -> str:
    """Return a line of ``sha256sum``, which escapes line feeds: a name cannot contain the line of another file."""
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return f"{'' if escaped == name else chr(92)}{sha256}  {escaped}\n"


def compute_folder_bytes(folder: Path) -> int:
    """Return the total size in bytes of the files below a folder; files that disappear meanwhile are skipped."""
    size = 0
    for parent, _, names in os.walk(folder):  # unlike Path.rglob, it tolerates folders that disappear
        for name in names:
            with contextlib.suppress(OSError):
                size += Path(parent, name).lstat().st_size
    return size


def normalize_case(path: str) -> str:
    """Return a text that is equal for all spellings of a path on a file system that ignores upper and lower case.

    Such file systems may also ignore characters without width, and other encodings of a character.
    """
    folded = unicodedata.normalize("NFKC", path).casefold()
    return unicodedata.normalize("NFKC", "".join(each for each in folded if unicodedata.category(each) != "Cf"))
