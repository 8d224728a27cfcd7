"""The journal of one attempt at a trial, and how far each of its readers has come in it.

A journal is one JSON object a line, appended to and never changed; beside it lie the files and the model that go with
it, and a file for each reader that says how far it is. Who has the folder's lock brings it to all of them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from hpsearch.kill_points import kill_point
from hpsearch.storage.files import append_whole, link_or_copy, sync_folder
from hpsearch.storage.journals.journal_records import Open, Record, decode, encode

log = logging.getLogger(__name__)

_LONGEST_JOURNAL = 256 * 2**20  # bytes
_MEMORY = 16 * 2**20  # bytes that wait for room on a full disk

JOURNAL = "journal.jsonl"
MLFLOW = "mlflow"  # the one reader that every study has


def position_file(reader: str) -> str:
    """Return the name of the file that says how far a reader is; MLflow's is that of the time when it was alone."""
    return "sent.json" if reader == MLFLOW else f"sent-{reader}.json"


@dataclass
class Position:
    """How far a reader is in a journal.

    Attributes:
        offset: bytes of the journal that have arrived.
        run: the run's id, once it is known.
        creating: "run" while one is created: it may exist although the reply was lost, and is looked for first.
        published: whether all that the trial made was in the journal; only its end may be missing.
        refused: why the reader will not have the rest; such a journal waits for a person.
        problem: the first thing that did not arrive and never will.
        over: whether the reader has all that it is to have.
    """

    offset: int = 0
    run: str | None = None
    creating: str | None = None
    published: bool = False
    refused: str | None = None
    problem: str | None = None
    over: bool = False


@dataclass(frozen=True)
class Entry:
    """A record of a journal, and the offset behind it; None for one that never found room on the disk."""

    record: Record
    end: int | None


class Journal:
    """What one attempt at a trial logs; written by one thread, read by another for each reader.

    Attributes:
        name: of the journal in its outbox, such as ``0007-2``.
        path: of the journal's file.
        files: the folder whose content, a tree, becomes the run's artifacts.
        model: the folder of the exported model.
        live: whether this process writes it; else its writer has died.
        places: of its readers.
        lost: records for which there was no room at all.
    """

    def __init__(
        self, folder: Path, descriptor: int | None, head: Open, *, live: bool, readers: Sequence[str] = (MLFLOW,)
    ) -> None:
        self.folder = folder
        self.name = folder.name
        self.path = folder / JOURNAL
        self.files = folder / "files"
        self.model = folder / "model"
        self.live = live
        self.head = head
        self.lost = 0
        self.mutex = threading.Lock()  # of all below, and of the places
        self.descriptor = descriptor
        self.size = os.fstat(descriptor).st_size if descriptor is not None else 0
        self.waiting: deque[bytes] = deque()  # lines that wait for room on the disk
        self.lent: set[str] = set()  # the readers that have the waiting lines
        self.places = {reader: Place(self, reader) for reader in readers}
        self._waiting_bytes = 0
        self._synced = 0  # bytes of it that survive a power cut
        self._synced_files: set[Path] = set()
        self._syncing = threading.Lock()
        self._told = False

    @property
    def over(self) -> bool:
        """Whether every reader has all of it."""
        return all(place.position.over for place in self.places.values())

    @kill_point("append to journal")
    def append(self, record: Record) -> None:
        """Write a record. It is with the operating system when this returns: a killed process loses nothing.

        Never raises and never waits: a full disk is told, and the record is kept in memory until there is room.
        """
        line = encode(record)
        with self.mutex:
            if self.size > _LONGEST_JOURNAL or self._waiting_bytes > _MEMORY:
                if not self.lost:
                    log.warning("%s: there is no room for more records: what is logged is lost", self.path)
                self.lost += 1
                return
            self.waiting.append(line)
            self._waiting_bytes += len(line)
            if not self.lent:
                self.write_waiting()

    def write_waiting(self) -> None:
        """Write what waits for room, where there is some now; with the mutex."""
        while self.waiting and self.descriptor is not None:
            line = self.waiting[0]
            try:
                append_whole(self.descriptor, line, self.size)
            except OSError as error:
                if not self._told:
                    self._told = True
                    reason = f"({error.strerror}): the trial goes on, its records wait in memory"
                    log.warning("%s cannot be written %s", self.path, reason)
                return
            self.size += len(line)
            self._told = False
            for place in self.places.values():
                place.written(len(line))
            self._drop_first()

    def drop_read(self) -> None:
        """Let go of the waiting lines that every reader has: they need no room any more; with the mutex."""
        while self.waiting and all(place.ahead for place in self.places.values()):
            for place in self.places.values():
                place.ahead -= 1
            self._drop_first()

    def _drop_first(self) -> None:
        self._waiting_bytes -= len(self.waiting.popleft())

    def keep(self, path: Path, folder: str | None = None) -> bool:
        """Keep a file for the run's artifacts, whatever becomes of the original; return whether it could be kept."""
        target = self.files / (folder or "") / path.name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            link_or_copy(path, target)
        except OSError as error:
            log.warning("%s is not kept for MLflow: %s", path.name, error.strerror)
            return False
        return True

    def sync(self) -> None:
        """Make what was written survive a power cut: the files first, for the journal speaks of them."""
        if self.descriptor is None or self.size == self._synced or not self._syncing.acquire(blocking=False):
            return  # or the thread of another reader is at it
        try:
            size = self.size
            with contextlib.suppress(OSError):  # a disk that cannot is told where it is written
                kept = {path for path in self.folder.glob("*/**/*") if path.is_file()}
                for path in sorted(kept - self._synced_files):
                    with path.open("rb") as file:
                        os.fsync(file.fileno())
                os.fsync(self.descriptor)
                sync_folder(self.folder)
                self._synced, self._synced_files = size, kept
        finally:
            self._syncing.release()

    def remove(self) -> None:
        """Remove the folder: all of it has arrived everywhere."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()  # not before: another process would find the folder free, and half of it gone

    def close(self) -> None:
        """Let another process have it."""
        with self._syncing:
            if self.descriptor is not None:
                os.close(self.descriptor)
                self.descriptor = None


class Place:
    """One reader's place in a journal; used by the thread of that reader alone, but for what is said to be shared.

    Attributes:
        position: how far the reader is for good; call `save` after a change.
        ahead: how many of the lines that wait for room the reader has; shared.
    """

    def __init__(self, journal: Journal, reader: str) -> None:
        self.journal = journal
        self.reader = reader
        self._path = journal.folder / position_file(reader)
        self.position = self._read()
        self.ahead = 0
        self._cursor = self.position.offset  # what was taken by now, and may yet have to be read again; shared

    def unsent(self) -> list[Entry]:
        """Return what is to be read, in its order; call `returned` when that is done or has failed.

        A last line that a crash has torn is left out.
        """
        journal, entries = self.journal, list[Entry]()
        with journal.mutex:
            end = self._cursor
        try:
            with journal.path.open("rb") as file:
                file.seek(end)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    end += len(line)
                    entries.append(Entry(decode(line), end))
        except OSError:
            if journal.descriptor is not None:
                raise
        except ValueError:
            self.position.problem = self.position.problem or "its journal on disk was damaged"
        with journal.mutex:
            # Not while the writer was at it just now: what follows is in memory alone.
            if len(journal.waiting) > self.ahead and (journal.descriptor is None or end == journal.size):
                journal.lent.add(self.reader)
                entries += [Entry(decode(line), None) for line in list(journal.waiting)[self.ahead :]]
        return entries

    def taken(self, entries: Sequence[Entry]) -> None:
        """Note that these need not be read again, unless it comes to a `rewind`: they are on their way."""
        ends = [entry.end for entry in entries if entry.end is not None]
        with self.journal.mutex:
            self._cursor = max([self._cursor, *ends])
            self.ahead += len(entries) - len(ends)
            self.journal.drop_read()

    def moved(self, entries: Sequence[Entry]) -> None:
        """Note that these have arrived for good, with all that was taken before."""
        self.taken(entries)
        self.settle()

    def settle(self) -> None:
        """Note that all that was taken has arrived for good."""
        self.position.offset = self._cursor
        self.save()

    def rewind(self) -> None:
        """Read again what was taken and has not arrived."""
        with self.journal.mutex:
            self._cursor = self.position.offset

    def returned(self) -> None:
        """Take back what `unsent` lent and nobody could bring on: it is written once there is room."""
        with self.journal.mutex:
            self.journal.lent.discard(self.reader)
            if not self.journal.lent:
                self.journal.write_waiting()

    def written(self, size: int) -> None:
        """Note that the first waiting line, of so many bytes, stands at the end of the file by now; with the mutex."""
        if self.ahead:
            self.ahead -= 1
            if self.position.offset == self._cursor:
                self.position.offset += size
            self._cursor += size

    @kill_point("record position")
    def save(self) -> None:
        """Write the position to disk."""
        temporary = self.journal.folder / f".{self._path.name}"
        try:
            temporary.write_text(json.dumps(asdict(self.position)))
            temporary.replace(self._path)
        except OSError:  # a full disk: they may be brought there again, which changes nothing
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _read(self) -> Position:
        try:
            found = json.loads(self._path.read_text())
            return Position(**{field.name: found[field.name] for field in fields(Position) if field.name in found})
        except (OSError, ValueError, TypeError):
            return Position()
