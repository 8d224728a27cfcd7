"""The event files of one trial: appended to by one process each, read back to see what is there.

A process that dies leaves a torn event at the end of its file, where readers stop: another process goes on in a file of
its own, whose name is later, since TensorBoard reads files in the order of their names.
"""

from __future__ import annotations

import fcntl
import io
import itertools
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpsearch.storage.database.locks import LockHeldError

_END = ".end"  # of the file that says how the trial ended
_LOCK = ".lock"  # a file that TensorBoard does not look at
_numbers = itertools.count()


class EventFiles:
    """The event files of a trial, of which this object appends to one of its own.

    What is added is on disk after `flush`, all of it or nothing.

    Args:
        folder: of the trial, made when it is needed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: Path | None = None
        self._size = 0  # of our own file
        self._earliest = 0  # the time that the name of the next file may have
        self._points: set[tuple[str, int]] = set()  # tag and step of what is there
        self._read: dict[str, int] = {}  # sizes of the others' files that were read
        self._added: set[tuple[str, int]] = set()
        self._events: list[Any] = []

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from the trial's files, and know what they have written.

        Raises:
            LockHeldError: another process is at them.
            OSError: the folder cannot be used.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LockHeldError(f"{self.folder}: another process writes there") from None
            except OSError:
                pass  # a file system without locks: two that write at once are rare
            self._catch_up()
            yield
        finally:
            self._events.clear()
            self._added.clear()
            os.close(descriptor)

    def has(self, tag: str, step: int) -> bool:
        """Whether there is a point, of this process or another."""
        return (tag, step) in self._points or (tag, step) in self._added

    def add(self, event: Any, *points: tuple[str, int]) -> None:
        """Add an event (`tensorboard.compat.proto.event_pb2.Event`) and the points that it has."""
        self._events.append(event)
        self._added.update(points)

    def flush(self) -> None:
        """Write what was added so that it survives a power cut.

        Raises:
            OSError: there is no room; nothing was written.
        """
        if not self._events:
            return
        if self._file is None:
            self._file, first = self._new_file(), [_version()]
        else:
            first = []
        self._append(self._file, [*first, *self._events])
        self._points.update(self._added)
        self._events.clear()
        self._added.clear()

    def _append(self, path: Path, events: list[Any]) -> None:
        data = _records(events)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            written = 0
            try:
                while written < len(data):
                    written += os.write(descriptor, data[written:])
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, self._size)  # a torn event would hide what follows
                raise
            self._size += written
        finally:
            os.close(descriptor)

    def write_end(self, event: Any) -> None:
        """Write the one event that says how the trial ended, in place of an earlier one.

        It has a file of its own, for of such events readers take the first: see `reopen`.

        Raises:
            OSError: there is no room.
        """
        path, hidden = self._new_file(_END), self.folder / f".end-{os.getpid()}"
        data = _records([_version(), event])
        with hidden.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self.reopen()
        hidden.rename(path)

    def reopen(self) -> None:
        """Take back that the trial has ended: it goes on."""
        self._earliest = self._stamp()  # TensorBoard may be at what is removed now
        for path in self._files():
            if path.name.endswith(_END):
                path.unlink(missing_ok=True)

    def _new_file(self, suffix: str = "") -> Path:
        """Return a name for a file that readers take up after those that are there, whatever the clocks say."""
        where = f"{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        return self.folder / f"events.out.tfevents.{self._stamp():010d}.{where}{suffix}"

    def _stamp(self) -> int:
        stamps = [int(match[1]) for path in self._files() if (match := re.search(r"tfevents\.(\d+)", path.name))]
        return max([int(time.time()), self._earliest, *(found + 1 for found in stamps)])

    def _files(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if path.name.startswith("events.out.tfevents."))

    def _catch_up(self) -> None:
        for path in self._files():
            if path == self._file:
                continue
            size = path.stat().st_size
            if self._read.get(path.name) != size:
                self._points.update(_points_in(path))
                self._read[path.name] = size


def _points_in(path: Path) -> Iterator[tuple[str, int]]:
    """Yield tag and step of what TensorBoard finds in a file, which may end in the middle of an event."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    for data in RawEventFileLoader(str(path)).Load():
        event = Event.FromString(data)
        for value in event.summary.value:
            yield value.tag, event.step


def _records(events: list[Any]) -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter

    data = io.BytesIO()
    writer = RecordWriter(data)
    for event in events:
        writer.write(event.SerializeToString())
    return data.getvalue()


def _version() -> Any:
    """Return what every file begins with."""
    from tensorboard.compat.proto.event_pb2 import Event

    return Event(wall_time=time.time(), file_version="brain.Event:2")
