"""TensorBoard event files: build and append events."""

from __future__ import annotations

import errno
import io
import itertools
import os
import re
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpsearch.kill_points import kill_point
from hpsearch.storage.database.locks import LockHeldError
from hpsearch.storage.files import append_atomically, lock_file
from hpsearch.storage.trackers.tensorboard.hparams import make_session_end
from hpsearch.storage.trials.finishing import Outcome

_END_SUFFIX = ".end"  # suffix of the file with the outcome of the trial
_LOCK = ".lock"  # TensorBoard ignores this file
_file_numbers = itertools.count()


def reject_link(folder: Path) -> None:
    """Reject a folder that is a link of another user.

    Raises:
        OSError: the folder is a link of another user.
    """
    if folder.is_symlink() and folder.lstat().st_uid not in (0, os.geteuid()):
        raise OSError(errno.ELOOP, f"{folder.name!r} is a link of another user")


class EventFiles:
    """The event files of a trial. An `EventFiles` object reads all event files, and appends events to its own file.

    `flush` writes either all events that were added, or none.

    Args:
        folder: the folder of the trial, which is created when it is needed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: Path | None = None
        self._size = 0  # size in bytes of the file of this object
        self._min_timestamp = 0  # minimum timestamp in the name of the next file
        self._points: set[tuple[str, int]] = set()  # (tag, step) of all points, written or added
        self._read_sizes: dict[str, int] = {}  # sizes of other objects' files when they were read, by name
        self._added: set[tuple[str, int]] = set()  # points that are not written yet
        self._events: list[Any] = []

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the trial's files against other processes, and read the points that other processes have written.

        Raises:
            LockHeldError: another process holds the lock.
            OSError: the folder is not usable.
        """
        for folder in (self.folder.parent, self.folder):
            reject_link(folder)
            folder.mkdir(parents=True, exist_ok=True)
        if (descriptor := lock_file(self.folder / _LOCK)) is None:
            raise LockHeldError(f"another process writes to {self.folder}")
        try:
            self._read_other_files()
            yield
        finally:
            self._points -= self._added
            self._events.clear()
            self._added.clear()
            os.close(descriptor)

    def add(self, summary: Any, *, step: int, at: float) -> None:
        """Add the values of a summary that are not in the files yet.

        Args:
            summary: a `tensorboard.compat.proto.summary_pb2.Summary`.
            step: the step of the values.
            at: the unix time of the event in seconds.
        """
        if values := [value for value in summary.value if (value.tag, step) not in self._points]:
            self._events.append(_make_event(values, step, at))
            points = {(value.tag, step) for value in values}
            self._points |= points
            self._added |= points

    @kill_point("write events")
    def flush(self) -> None:
        """Write the added events and sync them to disk.

        Raises:
            OSError: the disk is full, or the file was replaced by a link; nothing was written.
        """
        if not self._events:
            return
        data = _serialize([*([] if self._size else [_make_version_event()]), *self._events])
        path, exclusive = (self._make_path(), os.O_EXCL) if self._file is None else (self._file, 0)
        # Another user who can write to the folder could place a link to a file of this user.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | exclusive, 0o666)
        self._file = path
        try:
            append_atomically(descriptor, data, self._size)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._size += len(data)
        self._events.clear()
        self._added.clear()

    def write_end(self, outcome: Outcome, *, at: float) -> None:
        """Write the outcome of the trial, which replaces an earlier outcome.

        TensorBoard uses only the first outcome. Therefore the outcome is in a separate file, which `reopen` removes.

        Args:
            outcome: the outcome of the trial.
            at: the end of the trial as unix time in seconds.

        Raises:
            OSError: the disk is full.
        """
        path, hidden = self._make_path(_END_SUFFIX), self.folder / f".end-{uuid.uuid4().hex}"
        data = _serialize([_make_version_event(), _make_event([make_session_end(outcome, at)], 0, at)])
        with hidden.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self.reopen()
        hidden.rename(path)

    def reopen(self) -> None:
        """Remove the outcome of the trial, because the trial is resumed."""
        self._min_timestamp = self._next_timestamp()  # TensorBoard may be reading a file that is removed here
        for path in self._list_files():
            if path.name.endswith(_END_SUFFIX):
                path.unlink(missing_ok=True)

    def _make_path(self, suffix: str = "") -> Path:
        """Return a path for a new file that sorts after the existing files, even if the clocks of machines differ."""
        origin = f"{socket.gethostname()}.{os.getpid()}.{next(_file_numbers)}"
        return self.folder / f"events.out.tfevents.{self._next_timestamp():010d}.{origin}{suffix}"

    def _next_timestamp(self) -> int:
        names = [path.name for path in self._list_files()]
        timestamps = [int(match[1]) for name in names if (match := re.search(r"tfevents\.(\d+)", name))]
        return max([int(time.time()), self._min_timestamp, *(timestamp + 1 for timestamp in timestamps)])

    def _list_files(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if path.name.startswith("events.out.tfevents."))

    def _read_other_files(self) -> None:
        for path in self._list_files():
            if path == self._file:
                continue
            size = path.stat().st_size
            if self._read_sizes.get(path.name) != size:
                self._points.update(_read_points(path))
                self._read_sizes[path.name] = size


def _read_points(path: Path) -> Iterator[tuple[str, int]]:
    """Yield (tag, step) of all points in an event file; like TensorBoard, skip an incomplete last event."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    for data in RawEventFileLoader(str(path)).Load():
        event = Event.FromString(data)
        for value in event.summary.value:
            yield value.tag, event.step


def _serialize(events: list[Any]) -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter

    data = io.BytesIO()
    writer = RecordWriter(data)
    for event in events:
        writer.write(event.SerializeToString())
    return data.getvalue()


def _make_version_event() -> Any:
    """Return the event with the file version, which is the first event of every file."""
    from tensorboard.compat.proto.event_pb2 import Event

    return Event(wall_time=time.time(), file_version="brain.Event:2")


def make_tag(metric: str) -> str:
    """Return the TensorBoard tag of a metric; training and validation values of a metric share a plot."""
    kind, _, name = metric.partition("_")
    return f"{name}/{kind}" if kind in {"train", "val"} and name else metric


def make_scalars(values: Mapping[str, float]) -> Any:
    """Return a summary of metric values, given by tag."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])


def make_text(tag: str, text: str) -> Any:
    """Return a summary with a Markdown text."""
    from tensorboard.plugins.text.summary_v2 import text_pb

    return text_pb(tag, text)


def format_table(values: Mapping[str, str]) -> str:
    """Return names and values as a Markdown table."""
    rows = [f"| {name} | {value.replace('|', '&#124;')} |" for name, value in values.items()]
    return "\n".join(["| tag | value |", "|---|---|", *rows])


def _make_event(values: list[Any], step: int, at: float) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Event(wall_time=at, step=step, summary=Summary(value=values))
