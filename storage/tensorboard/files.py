"""TensorBoard event files: encode and append events."""

from __future__ import annotations

import fcntl
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

    @kill_point("write events")
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


def tag_of(metric: str) -> str:
    """Return a metric's tag: train and val of the same one share a plot, as those of `hpsearch train` do."""
    kind, _, name = metric.partition("_")
    return f"{name}/{kind}" if kind in {"train", "val"} and name else metric


def scalars(values: Mapping[str, float], *, step: int, at: float) -> Any:
    """Return the event of metrics by their tags, at unix seconds `at`."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata

    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="scalars"))
    return _event([Summary.Value(tag=t, simple_value=v, metadata=metadata) for t, v in values.items()], step, at)


def text(tag: str, words: str, *, step: int, at: float) -> Any:
    """Return the event of a text, in Markdown."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype="DT_STRING", string_val=[words.encode()], tensor_shape=shape)
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return _event([Summary.Value(tag=tag, tensor=tensor, metadata=metadata)], step, at)


def table(values: Mapping[str, str]) -> str:
    """Return tags as a table in Markdown."""
    rows = [f"| {name} | {value.replace('|', '&#124;')} |" for name, value in values.items()]
    return "\n".join(["| tag | value |", "|---|---|", *rows])


def session_start(params: Mapping[str, Any], *, trial: str, at: float) -> Any:
    """Return the event by which a trial is a row of the HParams tab.

    Args:
        params: a column each; what is neither number nor truth value is shown as text.
        trial: what the row is called.
        at: when it began, in unix seconds.
    """
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo

    info = SessionStartInfo(group_name=trial, start_time_secs=at)
    for name, value in params.items():
        if isinstance(value, bool):
            info.hparams[name].bool_value = value
        elif isinstance(value, int | float):
            info.hparams[name].number_value = value
        else:
            info.hparams[name].string_value = str(value)
    return _hparams(metadata.SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=info), at)


def session_end(outcome: Outcome, *, at: float) -> Any:
    """Return the event that ends a trial's row, at unix seconds `at`."""
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.api_pb2 import STATUS_FAILURE, STATUS_SUCCESS
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

    status = STATUS_SUCCESS if outcome in {Outcome.COMPLETE, Outcome.PRUNED} else STATUS_FAILURE
    info = SessionEndInfo(status=status, end_time_secs=at)
    return _hparams(metadata.SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=info), at)


def start_tag() -> str:
    """Return the tag of `session_start`."""
    from tensorboard.plugins.hparams import metadata

    return str(metadata.SESSION_START_INFO_TAG)


def _hparams(tag: str, data: Any, at: float) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata

    made = metadata.create_summary_metadata(data)
    return _event([Summary.Value(tag=tag, metadata=made, tensor=metadata.NULL_TENSOR)], 0, at)


def _event(values: list[Any], step: int, at: float) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Event(wall_time=at, step=step, summary=Summary(value=values))
