"""What is on its way to MLflow: on disk before the call that logs it returns, so that no death of a process loses it.

Each attempt at a trial has a folder of its own with a *journal*, one JSON object a line, appended to and never
changed; beside it lie the files and the model that go with it, and `sent.json`, which says how far the journal was
shipped. Who has the folder's lock ships it: the process that writes it or, when that has died, another of this machine.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import logging
import os
import shutil
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from storage.files import size_of, sync_folder
from storage.mlflow.journal_records import Open, Record, decode, encode

log = logging.getLogger(__name__)

LIMIT = 20 * 2**30  # bytes of all that waits; above it no more files are taken
_LONGEST_JOURNAL = 256 * 2**20  # bytes
_MEMORY = 16 * 2**20  # bytes that wait for room on a full disk
_ABANDONED = 3600.0  # seconds after which a journal that was never begun is one that never will be

JOURNAL, POSITION = "journal.jsonl", "sent.json"


@dataclass
class Position:
    """How far a journal was shipped.

    Attributes:
        offset: bytes of the journal that have arrived.
        run: the run's id, once it is known.
        creating: "run" or "model" while one is being created: a reply that was lost may have made it.
        published: whether all that the trial made was in the journal; only its end may be missing.
        refused: why the tracking server will not have the rest; such a journal waits for a person.
        problem: the first thing that did not arrive and never will.
    """

    offset: int = 0
    run: str | None = None
    creating: str | None = None
    published: bool = False
    refused: str | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Entry:
    """A record of a journal, and the offset behind it; None for one that never found room on the disk."""

    record: Record
    end: int | None


class Journal:
    """What one attempt at a trial has for MLflow; written by one thread, shipped by another.

    Attributes:
        live: whether this process writes it; else its writer has died.
        position: how far it was shipped; call `moved` after a change.
    """

    def __init__(self, folder: Path, descriptor: int | None, head: Open, *, live: bool) -> None:
        self.folder = folder
        self.live = live
        self.head = head
        self.position = self._read_position()
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size if descriptor is not None else 0
        self._synced = 0  # bytes of it that survive a power cut
        self._synced_files: set[Path] = set()
        self._mutex = threading.Lock()
        self._waiting: deque[bytes] = deque()  # lines that wait for room on the disk
        self._waiting_bytes = 0
        self._lent = False  # the sender has the waiting lines
        self._told = False
        self.lost = 0  # records for which there was no room at all

    @property
    def name(self) -> str:
        """The journal's name in its outbox, such as ``0007-2``."""
        return self.folder.name

    @property
    def files(self) -> Path:
        """The folder whose content, a tree, becomes the run's artifacts."""
        return self.folder / "files"

    @property
    def model(self) -> Path:
        """The folder of the exported model."""
        return self.folder / "model"

    @property
    def path(self) -> Path:
        """The journal's file."""
        return self.folder / JOURNAL

    def append(self, record: Record) -> None:
        """Write a record. It is with the operating system when this returns: a killed process loses nothing.

        Never raises and never waits: a full disk is told, and the record is kept in memory until there is room.
        """
        line = encode(record)
        with self._mutex:
            if self._size > _LONGEST_JOURNAL or self._waiting_bytes > _MEMORY:
                if not self.lost:
                    log.warning("%s: there is no room for more records: what is logged is lost", self.path)
                self.lost += 1
                return
            self._waiting.append(line)
            self._waiting_bytes += len(line)
            if not self._lent:
                self._write_waiting()

    def _write_waiting(self) -> None:
        while self._waiting and self._descriptor is not None:
            line, written = self._waiting[0], 0
            try:
                while written < len(line):
                    written += os.write(self._descriptor, line[written:])
            except OSError as error:
                os.ftruncate(self._descriptor, self._size)  # a torn line must not stand before a whole one
                self._tell(error)
                return
            self._size += written
            self._waiting.popleft()
            self._waiting_bytes -= written
            self._told = False

    def _tell(self, error: OSError) -> None:
        if not self._told:
            self._told = True
            log.warning(
                "%s cannot be written (%s): the trial goes on, its records wait in memory", self.path, error.strerror
            )

    def keep(self, path: Path, folder: str | None = None) -> bool:
        """Keep a file for the run's artifacts, whatever becomes of the original; return whether it could be kept."""
        target = self.files / folder / path.name if folder else self.files / path.name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            try:
                os.link(path, target)
            except OSError:  # another file system, or one without links
                shutil.copyfile(path, target)
        except OSError as error:
            log.warning("%s is not kept for MLflow: %s", path.name, error.strerror)
            return False
        return True

    def unsent(self) -> list[Entry]:
        """Return what is to be shipped, in its order; call `moved` or `returned` when that is done or has failed.

        A last line that a crash has torn is left out.
        """
        entries: list[Entry] = []
        end = self.position.offset
        try:
            with self.path.open("rb") as file:
                file.seek(end)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    end += len(line)
                    entries.append(Entry(decode(line), end))
        except OSError:
            if self._descriptor is not None:
                raise
        except ValueError:
            self.position.problem = self.position.problem or "its journal on disk was damaged"
        with self._mutex:
            # Not while the writer was at it just now: what follows is in memory alone.
            if self._waiting and (self._descriptor is None or end == self._size):
                self._lent = True
                entries += [Entry(decode(line), None) for line in self._waiting]
        return entries

    def moved(self, entries: list[Entry]) -> None:
        """Note that these have arrived; without any, note the position as it is."""
        ends = [entry.end for entry in entries if entry.end is not None]
        self.position.offset = max([self.position.offset, *ends])
        with self._mutex:
            for _ in range(len(entries) - len(ends)):
                self._waiting_bytes -= len(self._waiting.popleft())
        temporary = self.folder / ".sent.json"
        try:
            temporary.write_text(json.dumps(asdict(self.position)))
            temporary.replace(self.folder / POSITION)
        except OSError:  # a full disk: they may be sent again, which changes nothing
            with contextlib.suppress(OSError):
                temporary.unlink()

    def returned(self) -> None:
        """Take back what `unsent` lent and nobody could ship: it is written once there is room."""
        with self._mutex:
            self._lent = False
            self._write_waiting()

    def sync(self) -> None:
        """Make what was written survive a power cut: the files first, for the journal speaks of them."""
        if self._descriptor is None or self._size == self._synced:
            return
        size = self._size
        with contextlib.suppress(OSError):  # a disk that cannot is told where it is written
            kept = {path for path in self.folder.glob("*/**/*") if path.is_file()}
            for path in sorted(kept - self._synced_files):
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            os.fsync(self._descriptor)
            sync_folder(self.folder)
            self._synced, self._synced_files = size, kept

    def _read_position(self) -> Position:
        try:
            return Position(**json.loads((self.folder / POSITION).read_text()))
        except (OSError, ValueError, TypeError):
            return Position()

    def remove(self) -> None:
        """Remove the folder: all of it has arrived."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()  # not before: another process would find the folder free, and half of it gone

    def close(self) -> None:
        """Let another process have it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class Outbox:
    """The journals of one study on this machine.

    Args:
        folder: the study's, made when it is needed.
        limit: bytes of all that waits there above which files are no longer taken, only numbers.
    """

    def __init__(self, folder: Path, *, limit: int = LIMIT) -> None:
        self.folder = folder
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
        journal = Journal(folder, descriptor, head, live=True)
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
                yield Journal(folder, descriptor, head, live=False)
            else:  # its writer died before the first line was whole, and so it has nothing for MLflow
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
