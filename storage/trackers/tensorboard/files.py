"""TensorBoard event files: build and append events."""

from __future__ import annotations

import io
import itertools
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpsearch.kill_points import kill_point
from hpsearch.storage.database.locks import LockHeldError
from hpsearch.storage.files import append_whole, lock_file
from hpsearch.storage.trials.settle import Outcome

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
        self._points: set[tuple[str, int]] = set()  # tag and step of what is there or was added
        self._read: dict[str, int] = {}  # sizes of the others' files that were read
        self._added: set[tuple[str, int]] = set()  # the points that are not written yet
        self._events: list[Any] = []

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from the trial's files, and know what they have written.

        Raises:
            LockHeldError: another process is at them.
            OSError: the folder cannot be used.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = lock_file(self.folder / _LOCK)
        if descriptor is None:
            raise LockHeldError(f"{self.folder}: another process writes there")
        try:
            self._catch_up()
            yield
        finally:
            self._points -= self._added
            self._events.clear()
            self._added.clear()
            os.close(descriptor)

    def add(self, summary: Any, *, step: int, at: float) -> None:
        """Add those values of a summary that no process has written yet.

        Args:
            summary: a `tensorboard.compat.proto.summary_pb2.Summary`.
            step: the step of its values.
            at: the time of the event, in unix seconds.
        """
        if values := [value for value in summary.value if (value.tag, step) not in self._points]:
            self._events.append(_event(values, step, at))
            points = {(value.tag, step) for value in values}
            self._points |= points
            self._added |= points

    @kill_point("write events")
    def flush(self) -> None:
        """Write what was added so that it survives a power cut.

        Raises:
            OSError: there is no room; nothing was written.
        """
        if not self._events:
            return
        self._file = self._file or self._new_file()
        data = _records([*([] if self._size else [_version()]), *self._events])
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            append_whole(descriptor, data, self._size)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._size += len(data)
        self._events.clear()
        self._added.clear()

    def write_end(self, outcome: Outcome, *, at: float) -> None:
        """Write how the trial ended at unix seconds `at`, in place of an earlier end.

        The event has a file of its own, because readers use the first event of this kind: see `reopen`.

        Raises:
            OSError: there is no room.
        """
        path, hidden = self._new_file(_END), self.folder / f".end-{os.getpid()}"
        data = _records([_version(), _session_end(outcome, at)])
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


def tag_of(metric: str) -> str:
    """Return a metric's tag: train and val of the same one share a plot, as those of `hpsearch train` do."""
    kind, _, name = metric.partition("_")
    return f"{name}/{kind}" if kind in {"train", "val"} and name else metric


def scalars(values: Mapping[str, float]) -> Any:
    """Return the summary of metrics by their tags."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])


def text(tag: str, words: str) -> Any:
    """Return the summary of a text, in Markdown."""
    from tensorboard.plugins.text.summary_v2 import text_pb

    return text_pb(tag, words)


def table(values: Mapping[str, str]) -> str:
    """Return tags as a table in Markdown."""
    rows = [f"| {name} | {value.replace('|', '&#124;')} |" for name, value in values.items()]
    return "\n".join(["| tag | value |", "|---|---|", *rows])


def session_start(params: Mapping[str, Any], *, trial: str, at: float) -> Any:
    """Return the summary by which a trial is a row of the HParams tab.

    Args:
        params: one column per parameter; a value that is neither a number nor a boolean is shown as text.
        trial: the name of the row.
        at: the start of the trial, in unix seconds.
    """
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb

    shown = {name: value if isinstance(value, int | float) else str(value) for name, value in params.items()}
    return hparams_pb(shown, trial_id=trial, start_time_secs=at)


def _session_end(outcome: Outcome, at: float) -> Any:
    """Return the event that ends a trial's row, at unix seconds `at`."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.api_pb2 import STATUS_FAILURE, STATUS_SUCCESS
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

    status = STATUS_SUCCESS if outcome in {Outcome.COMPLETE, Outcome.PRUNED} else STATUS_FAILURE
    data = HParamsPluginData(session_end_info=SessionEndInfo(status=status, end_time_secs=at))
    made = metadata.create_summary_metadata(data)
    return _event([Summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=made, tensor=metadata.NULL_TENSOR)], 0, at)


def _event(values: list[Any], step: int, at: float) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Event(wall_time=at, step=step, summary=Summary(value=values))
