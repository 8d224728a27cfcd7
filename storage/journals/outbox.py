"""The outbox of a study on this machine: the journals that not every consumer has stored yet.

Each attempt at a trial has its own folder with a journal. The process that holds the folder's lock sends the journal:
the writer or, after its death, another process on this machine. No death of a process loses a record.
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

from hpsearch.storage.files import compute_folder_bytes
from hpsearch.storage.journals.journal import JOURNAL, MLFLOW, Journal
from hpsearch.storage.journals.journal_records import Header, decode

log = logging.getLogger(__name__)

LIMIT_BYTES = 20 * 2**30  # of all journals; above it no more artifacts are stored
_ABANDONED_SECONDS = 3600.0  # after which a journal without a header counts as abandoned by a dead process


class Outbox:
    """The journals of one study on this machine.

    Args:
        folder: the folder of the study; created when it is needed.
        consumers: the names of the study's consumers.
        limit_bytes: the size of all journals above which artifacts are no longer stored, only metrics.
    """

    def __init__(self, folder: Path, consumers: Sequence[str] = (MLFLOW,), *, limit_bytes: int = LIMIT_BYTES) -> None:
        self.folder = folder
        self._consumers = tuple(consumers)
        self._limit_bytes = limit_bytes

    def open(self, name: str, header: Header) -> Journal:
        """Create a journal.

        Args:
            name: the name of the journal, such as ``0007-2``; a number is appended if it is taken.
            header: the first record of the journal.
        """
        folder, descriptor = self.folder / name, None
        # Created under a hidden name: until it is locked, another process would take it for an orphan.
        hidden = self.folder / f".{name}-{uuid.uuid4().hex[:8]}"
        try:
            hidden.mkdir(parents=True, mode=0o700)
            descriptor = os.open(hidden / JOURNAL, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            folder = self._rename(hidden, name)
        except OSError as error:  # a full disk, or a file system without locks
            log.warning("%s: cannot create (%s); records are kept in memory", folder, error.strerror)
            if descriptor is not None:
                os.close(descriptor)
                descriptor = None
            shutil.rmtree(hidden, ignore_errors=True)
        journal = Journal(folder, descriptor, header, is_live=True, consumers=self._consumers)
        journal.append(header)
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

    def take_orphaned(self) -> Iterator[Journal]:
        """Lock and yield, one by one, the journals that no process holds."""
        for folder in self._folders():
            if (descriptor := _lock_journal(folder / JOURNAL)) is None:
                continue
            if (header := _read_header(folder / JOURNAL)) is not None:
                yield Journal(folder, descriptor, header, is_live=False, consumers=self._consumers)
            else:  # its writer died before the first line was complete, so it has no records
                shutil.rmtree(folder, ignore_errors=True)
                os.close(descriptor)

    def count_journals(self) -> int:
        """Return the number of journals, including those of running trials."""
        return len(self._folders())

    def has_journal(self, prefix: str) -> bool:
        """Return whether there is a journal whose name begins with `prefix`."""
        return any(folder.name.startswith(prefix) for folder in self._folders())

    def has_room(self) -> bool:
        """Return whether artifacts are still stored: the size of all journals is below the limit."""
        return compute_folder_bytes(self.folder) < self._limit_bytes

    def _folders(self) -> list[Path]:
        try:
            return sorted(path for path in self.folder.iterdir() if not path.name.startswith("."))
        except OSError:
            return []

    def clean_up(self) -> None:
        """Remove unfinished journals of dead processes, and the folder if it is empty."""
        with contextlib.suppress(OSError):
            for path in self.folder.glob(".*"):
                if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)
            self.folder.rmdir()


def _lock_journal(path: Path) -> int | None:
    """Open and lock a journal; return its descriptor, or None if another process holds it or has just removed it."""
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


def _read_header(path: Path) -> Header | None:
    """Return the first record of a journal; None if it is incomplete."""
    try:
        with path.open("rb") as file:
            line = file.readline()
        record = decode(line) if line.endswith(b"\n") else None
    except (OSError, ValueError):
        return None
    return record if isinstance(record, Header) else None
