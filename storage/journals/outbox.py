"""The outbox of a study on this machine: the journals that at least one consumer has not stored completely.

Each attempt of a trial has its own folder with a journal. The process that holds the journal's lock sends the journal.
This is the process that writes the journal or, after its death, another process on this machine. No record is lost
when a process dies.
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
from hpsearch.storage.journals.journal import JOURNAL_FILE, MLFLOW, Journal
from hpsearch.storage.journals.journal_records import Header, decode

log = logging.getLogger(__name__)

LIMIT_BYTES = 20 * 2**30  # total size of all journals above which no more artifacts are stored
_ABANDONED_SECONDS = 3600.0  # age of an unfinished journal whose process has certainly died


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
            name: the name of the journal, such as ``0007-2``; if the name is taken, a number is appended.
            header: the first record of the journal.
        """
        folder, descriptor = self.folder / name, None
        # Created under a hidden name: another process would treat a journal that is not locked yet as orphaned.
        hidden = self.folder / f".{name}-{uuid.uuid4().hex[:8]}"
        try:
            hidden.mkdir(parents=True, mode=0o700)
            descriptor = os.open(hidden / JOURNAL_FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
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

    def take_orphaned_journals(self) -> Iterator[Journal]:
        """Lock and yield, one by one, the journals whose locks no process holds."""
        for folder in self._folders():
            if (descriptor := _lock_journal(folder / JOURNAL_FILE)) is None:
                continue
            if (header := _read_header(folder / JOURNAL_FILE)) is not None:
                yield Journal(folder, descriptor, header, is_live=False, consumers=self._consumers)
            else:
                if _is_empty(folder / JOURNAL_FILE):  # its writer died before the first line was complete
                    shutil.rmtree(folder, ignore_errors=True)
                os.close(descriptor)

    def find_damaged(self) -> list[Path]:
        """Return the folders whose journal is missing or has a damaged first record, so that it cannot be sent."""
        return [folder for folder in self._folders() if _read_header(folder / JOURNAL_FILE) is None]

    def count_journals(self) -> int:
        """Return the number of journals, including those of running trials."""
        return len(self._folders())

    def find_trial_numbers(self) -> set[str]:
        """Return the numbers of the trials that have journals, including running trials, as in the journals' names."""
        return {folder.name.partition("-")[0] for folder in self._folders()}

    def has_journal(self, prefix: str) -> bool:
        """Return whether the outbox contains a journal whose name begins with `prefix`."""
        return any(folder.name.startswith(prefix) for folder in self._folders())

    def has_space(self) -> bool:
        """Return whether the size of all journals is below the limit, so that artifacts are still stored."""
        return compute_folder_bytes(self.folder) < self._limit_bytes

    def _folders(self) -> list[Path]:
        try:
            return sorted(path for path in self.folder.iterdir() if not path.name.startswith("."))
        except OSError:
            return []

    def clean_up(self) -> None:
        """Remove unfinished journals of dead processes, and the folder of the outbox if it is empty."""
        with contextlib.suppress(OSError):
            for path in self.folder.glob(".*"):
                if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)
            self.folder.rmdir()


def _lock_journal(path: Path) -> int | None:
    """Open and lock a journal; return its descriptor, or None if another process holds the lock or removed the file."""
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


def _is_empty(path: Path) -> bool:
    """Return whether a journal has no complete line."""
    with path.open("rb") as file:
        return not file.readline().endswith(b"\n")


def _read_header(path: Path) -> Header | None:
    """Return the first record of a journal; None if this record is incomplete or damaged."""
    try:
        with path.open("rb") as file:
            line = file.readline()
        record = decode(line) if line.endswith(b"\n") else None
    except (OSError, ValueError):
        return None
    return record if isinstance(record, Header) else None
