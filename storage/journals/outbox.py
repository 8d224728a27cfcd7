"""What is on its way to the readers of a study, on disk: no death of a process loses it.

Each attempt at a trial has a folder of its own with a journal. Who has the folder's lock brings it to its readers: the
process that writes it or, when that has died, another of this machine.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpsearch.storage.files import size_of
from hpsearch.storage.journals.journal import JOURNAL, MLFLOW, Journal
from hpsearch.storage.journals.journal_records import Open, decode

log = logging.getLogger(__name__)

LIMIT = 20 * 2**30  # bytes of all that waits; above it no more files are taken
_ABANDONED = 3600.0  # seconds after which a journal that was never begun is one that never will be


class Outbox:
    """The journals of one study on this machine.

    Args:
        folder: the study's, made when it is needed.
        readers: of the study.
        limit: bytes of all that waits there above which files are no longer taken, only numbers.
    """

    def __init__(self, folder: Path, readers: Sequence[str] = (MLFLOW,), *, limit: int = LIMIT) -> None:
        self.folder = folder
        self._readers = tuple(readers)
        self._limit = limit

    def open(self, name: str, head: Open) -> Journal:
        """Begin a journal; a name that is taken gets a number.

        Args:
            name: such as ``0007-2``.
            head: its first record: whose journal it is.
        """
        folder, descriptor = self.folder / name, None
        # Made under a name that nobody looks at, for until it is locked it seems left behind.
        hidden = self.folder / f".{name}-{uuid.uuid4().hex[:8]}"
        try:
            hidden.mkdir(parents=True, mode=0o700)
            descriptor = os.open(hidden / JOURNAL, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            folder = self._rename(hidden, name)
        except OSError as error:  # a full disk, or a file system without locks
            log.warning("%s cannot be made (%s): what is logged waits in memory", folder, error.strerror)
            if descriptor is not None:
                os.close(descriptor)
                descriptor = None
            shutil.rmtree(hidden, ignore_errors=True)
        journal = Journal(folder, descriptor, head, live=True, readers=self._readers)
        journal.append(head)
        return journal

    def _rename(self, hidden: Path, name: str) -> Path:
        for number in itertools.count(1):
            folder = self.folder / (name if number == 1 else f"{name}.{number}")
            if not folder.exists():
                try:
                    return hidden.rename(folder)
                except OSError as error:
                    if error.errno not in {errno.EEXIST, errno.ENOTEMPTY}:
                        raise
        raise AssertionError

    def left(self) -> Iterator[Journal]:
        """Take over, one by one, the journals that no process has: their writers have died, or left them behind."""
        for folder in self._folders():
            if (descriptor := _take(folder / JOURNAL)) is None:
                continue
            if (head := _head(folder / JOURNAL)) is not None:
                yield Journal(folder, descriptor, head, live=False, readers=self._readers)
            else:  # its writer died before the first line was whole, and so it has nothing for anybody
                shutil.rmtree(folder, ignore_errors=True)
                os.close(descriptor)

    def waiting(self) -> int:
        """Return how many journals there are, those of running trials included."""
        return len(self._folders())

    def has(self, prefix: str) -> bool:
        """Whether there is a journal whose name begins so."""
        return any(folder.name.startswith(prefix) for folder in self._folders())

    def has_room(self) -> bool:
        """Whether files are still taken; above the limit only numbers are."""
        return size_of(self.folder) < self._limit

    def _folders(self) -> list[Path]:
        try:
            return sorted(path for path in self.folder.iterdir() if not path.name.startswith("."))
        except OSError:
            return []

    def tidy(self) -> None:
        """Remove what processes left that died while they began a journal, and the folder when nothing waits."""
        with contextlib.suppress(OSError):
            for path in self.folder.glob(".*"):
                if time.time() - path.stat().st_mtime > _ABANDONED:
                    shutil.rmtree(path, ignore_errors=True)
            self.folder.rmdir()


def _take(path: Path) -> int | None:
    """Open a journal and lock it; None when another process has it, or has just removed it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.stat().st_ino == os.fstat(descriptor).st_ino:
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _head(path: Path) -> Open | None:
    """Return the first record of a journal; None when it was never written whole."""
    try:
        with path.open("rb") as file:
            line = file.readline()
        record = decode(line) if line.endswith(b"\n") else None
    except (OSError, ValueError):
        return None
    return record if isinstance(record, Open) else None
