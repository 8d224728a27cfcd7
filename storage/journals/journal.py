"""The journal of one attempt of a trial, and the position of each consumer in the journal.

A journal is an append-only file with one JSON object per line. The folder of the journal also contains the artifact
files and the model to upload, and one file per consumer with the consumer's position. The process that holds the lock
of the journal sends it to all consumers.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hpsearch.kill_points import kill_point
from hpsearch.storage.files import append_atomically, fsync_folder, link_or_copy
from hpsearch.storage.journals.journal_records import Header, Record, decode, encode

log = logging.getLogger(__name__)

_MAX_JOURNAL_BYTES = 256 * 2**20
# MLflow's client puts names of files into URLs as they are: `a#1` would overwrite `a`.
_UNSUPPORTED_IN_NAMES = re.compile(r"^ |[%#?\x00-\x1f\x7f\ud800-\udfff]")
_MAX_BUFFER_BYTES = 16 * 2**20  # maximum size of the records that wait in memory while the disk is full

JOURNAL_FILE = "journal.jsonl"
MLFLOW = "mlflow"  # the consumer that every study has


def get_position_file_name(consumer: str) -> str:
    """Return the name of the file with a consumer's position.

    The file for MLflow has the name that versions with MLflow as the only consumer used.
    """
    return "sent.json" if consumer == MLFLOW else f"sent-{consumer}.json"


@dataclass
class Position:
    """The committed position of a consumer in a journal.

    Attributes:
        offset: the number of bytes of the journal that the consumer has stored.
        run_id: the id of the trial's run; None until it is known.
        pending_creation: "run" while a run is being created, else None. After a crash, "run" means that the run may
            exist, so it is looked up before another run is created.
        has_all_artifacts: whether the consumer has read the record that all artifacts are in the journal.
        rejection: the reason why the service rejected the rest permanently; the journal waits until a user starts a
            retry. None if nothing was rejected.
        problem: a description of the first item that is permanently missing from the run; None if nothing is missing.
        is_consumed: whether the consumer has finished with the journal.
    """

    offset: int = 0
    run_id: str | None = None
    pending_creation: str | None = None
    has_all_artifacts: bool = False
    rejection: str | None = None
    problem: str | None = None
    is_consumed: bool = False


# The keys of a position file, in the order of the fields.
_POSITION_KEYS = ("offset", "run", "creating", "published", "refused", "problem", "over")


@dataclass(frozen=True)
class JournalEntry:
    """A record of a journal.

    Attributes:
        record: the record.
        end_offset: the offset in the journal's file after the record; None for a record that is only in memory,
            because the disk is full.
    """

    record: Record
    end_offset: int | None


class Journal:
    """The log of one attempt of a trial; written by one thread, read by one thread per consumer.

    Attributes:
        name: the journal's name in its outbox: trial number and attempt, such as ``0007-2``.
        path: the path of the journal's file.
        artifact_folder: the folder with the run's artifacts; the artifact paths are relative to this folder.
        model_folder: the folder of the exported model.
        is_live: whether this process writes the journal; otherwise the process that wrote it has died.
        cursors: the cursor of each consumer, by the consumer's name.
        lost_records: the number of records that were dropped because disk and memory were full.
    """

    def __init__(
        self,
        folder: Path,
        descriptor: int | None,
        header: Header,
        *,
        is_live: bool,
        consumers: Sequence[str] = (MLFLOW,),
    ) -> None:
        self.folder = folder
        self.name = folder.name
        self.path = folder / JOURNAL_FILE
        self.artifact_folder = folder / "files"
        self.model_folder = folder / "model"
        self.is_live = is_live
        self.header = header
        self.lost_records = 0
        self.mutex = threading.Lock()  # guards the attributes below, and the cursors
        self.descriptor = descriptor
        self.size = os.fstat(descriptor).st_size if descriptor is not None else 0
        self.buffer: deque[bytes] = deque()  # lines that wait for space on the disk
        self.buffer_readers: set[str] = set()  # the consumers that are sending the buffered lines
        self.cursors = {consumer: Cursor(self, consumer) for consumer in consumers}
        self._buffer_bytes = 0
        self._synced_bytes = 0  # synced to disk
        self._synced_files: set[Path] = set()
        self._sync_lock = threading.Lock()
        self._has_warned = False

    @property
    def trial_number(self) -> str:
        """The trial's number, as in the journal's name."""
        return self.name.partition("-")[0]

    @property
    def is_fully_consumed(self) -> bool:
        """Whether every consumer has finished with the journal."""
        return all(cursor.position.is_consumed for cursor in self.cursors.values())

    @kill_point("append to journal")
    def append(self, record: Record) -> None:
        """Write a record to the journal's file, without a sync to disk.

        If the process is killed after the call, the record is not lost. The method never raises an exception and never
        waits. If the disk is full, it logs a warning and keeps the record in memory until the disk has space.
        """
        line = encode(record)
        with self.mutex:
            if self.size > _MAX_JOURNAL_BYTES or self._buffer_bytes > _MAX_BUFFER_BYTES:
                if not self.lost_records:
                    log.warning("%s: maximum file size reached; further records of the trial are dropped", self.path)
                self.lost_records += 1
                return
            self.buffer.append(line)
            self._buffer_bytes += len(line)
            if not self.buffer_readers:
                self.flush_buffer()

    def flush_buffer(self) -> None:
        """Write buffered lines to disk while there is space; the caller must hold the mutex."""
        while self.buffer and self.descriptor is not None:
            line = self.buffer[0]
            try:
                append_atomically(self.descriptor, line, self.size)
            except OSError as error:
                if not self._has_warned:
                    self._has_warned = True
                    log.warning("%s: cannot write (%s); records are kept in memory", self.path, error.strerror)
                return
            self.size += len(line)
            self._has_warned = False
            for cursor in self.cursors.values():
                cursor.on_buffered_line_written(len(line))
            self._drop_first_line()

    def drop_consumed(self) -> None:
        """Drop the buffered lines that every consumer has read; the caller must hold the mutex."""
        while self.buffer and all(cursor.buffered_lines_read for cursor in self.cursors.values()):
            for cursor in self.cursors.values():
                cursor.buffered_lines_read -= 1
            self._drop_first_line()

    def _drop_first_line(self) -> None:
        self._buffer_bytes -= len(self.buffer.popleft())

    def store_artifact(self, path: Path, folder: str | None = None) -> bool:
        """Link or copy a file into the journal's artifact folder; return whether this succeeded.

        In its name, `_` replaces characters that MLflow does not support.

        Args:
            path: the file, which the caller may replace or delete afterwards.
            folder: the subfolder of the artifact folder; None for the artifact folder itself.
        """
        target = self.artifact_folder / (folder or "") / _UNSUPPORTED_IN_NAMES.sub("_", path.name)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            if path.exists() and not path.is_file():  # reading a pipe or a device may never end
                raise OSError(errno.EINVAL, "not a regular file")
            link_or_copy(path, target)
        except OSError as error:
            log.warning("%s: file not stored as an MLflow artifact (%s)", path.name, error.strerror)
            return False
        return True

    def sync(self) -> None:
        """Sync the journal to disk against a power cut: first the artifact files, then the records that name them."""
        if self.descriptor is None or self.size == self._synced_bytes or not self._sync_lock.acquire(blocking=False):
            return  # there is no file, nothing is new, or the thread of another consumer is syncing
        try:
            size = self.size
            with contextlib.suppress(OSError):  # `flush_buffer` logs the errors of the disk
                files = {path for path in self.folder.glob("*/**/*") if path.is_file()}
                for path in sorted(files - self._synced_files):
                    with path.open("rb") as file:
                        os.fsync(file.fileno())
                os.fsync(self.descriptor)
                fsync_folder(self.folder)
                self._synced_bytes, self._synced_files = size, files
        finally:
            self._sync_lock.release()

    def remove(self) -> None:
        """Remove the folder of a fully consumed journal."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()  # not earlier: another process could lock a half-removed folder

    def close(self) -> None:
        """Release the lock, so that another process can take over the journal."""
        with self._sync_lock:
            if self.descriptor is not None:
                os.close(self.descriptor)
                self.descriptor = None


class Cursor:
    """The cursor of one consumer in a journal.

    Only the consumer's thread uses a cursor, except for attributes that are guarded by the journal's mutex.

    Attributes:
        position: the committed position; call `save` after a change.
        buffered_lines_read: the number of buffered lines that the consumer has read; guarded by the mutex.
    """

    def __init__(self, journal: Journal, consumer: str) -> None:
        self.journal = journal
        self.consumer = consumer
        self._path = journal.folder / get_position_file_name(consumer)
        self.position = self._load_position()
        self.buffered_lines_read = 0
        # Higher than the committed offset while entries are in flight; guarded by the mutex.
        self._read_offset = self.position.offset

    def read_pending(self) -> list[JournalEntry]:
        """Return the entries to send, in order.

        After the entries were sent, or sending has failed, call `release_buffered_lines`. A truncated last line, which
        a crash may leave, is skipped.
        """
        journal, entries = self.journal, list[JournalEntry]()
        with journal.mutex:
            end = self._read_offset
        try:
            with journal.path.open("rb") as file:
                file.seek(end)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    end += len(line)
                    entries.append(JournalEntry(decode(line), end))
        except OSError:
            if journal.descriptor is not None:
                raise
        except ValueError:
            self.position.problem = self.position.problem or "the journal on disk was damaged"
        with journal.mutex:
            # If the writer has just appended to the file, the buffered lines come later than the new lines of the file.
            if len(journal.buffer) > self.buffered_lines_read and (journal.descriptor is None or end == journal.size):
                journal.buffer_readers.add(self.consumer)
                buffered = list(journal.buffer)[self.buffered_lines_read :]
                entries += [JournalEntry(decode(line), None) for line in buffered]
        return entries

    def mark_in_flight(self, entries: Sequence[JournalEntry]) -> None:
        """Record that these entries are being sent, so that `read_pending` omits them until `rewind` is called."""
        ends = [entry.end_offset for entry in entries if entry.end_offset is not None]
        with self.journal.mutex:
            self._read_offset = max([self._read_offset, *ends])
            self.buffered_lines_read += len(entries) - len(ends)
            self.journal.drop_consumed()

    def commit(self, entries: Sequence[JournalEntry]) -> None:
        """Record that the consumer has stored these entries, and all entries that were in flight."""
        self.mark_in_flight(entries)
        self.commit_in_flight()

    def commit_in_flight(self) -> None:
        """Record that the consumer has stored all entries in flight."""
        self.position.offset = self._read_offset
        self.save()

    def rewind(self) -> None:
        """Go back to the committed offset, so that entries in flight are read again."""
        with self.journal.mutex:
            self._read_offset = self.position.offset

    def release_buffered_lines(self) -> None:
        """Allow the journal again to write its buffered lines to disk, after `read_pending` has returned them."""
        with self.journal.mutex:
            self.journal.buffer_readers.discard(self.consumer)
            if not self.journal.buffer_readers:
                self.journal.flush_buffer()

    def on_buffered_line_written(self, size: int) -> None:
        """Adjust the offsets after the first buffered line (`size` bytes) was written; the caller holds the mutex."""
        if self.buffered_lines_read:
            self.buffered_lines_read -= 1
            if self.position.offset == self._read_offset:
                self.position.offset += size
            self._read_offset += size

    @kill_point("record position")
    def save(self) -> None:
        """Write the position to disk."""
        temporary = self.journal.folder / f".{self._path.name}"
        try:
            temporary.write_text(json.dumps(dict(zip(_POSITION_KEYS, asdict(self.position).values(), strict=True))))
            temporary.replace(self._path)
        except OSError:  # the disk is full; the entries may be sent again, which has no effect
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _load_position(self) -> Position:
        try:
            stored = json.loads(self._path.read_text())
            fields = zip(asdict(Position()), _POSITION_KEYS, strict=True)
            return Position(**{field: stored[key] for field, key in fields if key in stored})
        except (OSError, ValueError, TypeError):
            return Position()
