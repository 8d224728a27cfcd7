"""From a journal to event files, read back with TensorBoard's own reader and its HParams plugin."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorboard", reason="TensorBoard is not installed")

from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams.backend_context import Context
from tensorboard.plugins.hparams.list_session_groups import Handler

from hpsearch.storage.database.locks import LockHeldError
from hpsearch.storage.errors import StorageError
from hpsearch.storage.journals.journal_records import Epoch, Metrics, Tags
from hpsearch.storage.trackers.tensorboard.consumer import TensorBoardConsumer
from hpsearch.storage.trackers.tensorboard.event_files import EventFiles, make_scalars
from hpsearch.storage.trials.finishing import Outcome
from tests.storage.journals.post import Post, log


@pytest.fixture
def post(database_url: str, tmp_path: Path) -> Post:
    return Post(database_url, tmp_path / "box", "tensorboard")


def reader_of(post: Post, root: Path, owner: str = "owner") -> TensorBoardConsumer:
    return TensorBoardConsumer(str(root), post.study, owner, root.parent, post.ends)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def points(folder: Path, tag: str = "loss/val") -> list[tuple[int, float, float]]:
    """Return step, time and value of all points of a run in TensorBoard."""
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    return [(each.step, each.wall_time, round(each.value, 6)) for each in found.Scalars(tag)]


def rows(root: Path) -> list[Any]:
    """Return the rows of the HParams tab."""
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(root)).Reload()
    provider = MultiplexerDataProvider(multiplexer, str(root))
    context = Context(TBContext(data_provider=provider))
    statuses = [api_pb2.STATUS_UNKNOWN, api_pb2.STATUS_SUCCESS, api_pb2.STATUS_FAILURE, api_pb2.STATUS_RUNNING]
    request = api_pb2.ListSessionGroupsRequest(allowed_statuses=statuses, start_index=0, slice_size=100)
    listed = context.hparams_metadata(RequestContext(), "")
    experiment = context.experiment_from_metadata(RequestContext(), "", True, listed, [])
    for info in experiment.metric_infos:
        request.col_params.add(metric=info.name)
    handler = Handler(RequestContext(), context, "", request)
    return list(handler.run().session_groups)


def status_of(group: Any) -> str:
    return str(api_pb2.Status.Name(group.sessions[0].status))


def test_a_trial_has_its_scalars_with_steps_and_times_and_its_hparams(post: Post, root: Path) -> None:
    reader, journal = reader_of(post, root), post.open()
    log(journal, range(3), at=100.0)
    assert not post.consume(reader, journal)
    [row] = rows(root)
    assert status_of(row) == "STATUS_UNKNOWN", "it runs"
    log(journal, [3], at=100.0)
    journal.append(Metrics(3, 103.0, {"best_val_loss": 0.0}))
    journal.append(Tags({"hpsearch.pruning": "{}"}))
    log(journal, [], end=Outcome.COMPLETE)
    assert post.consume(reader, journal)
    folder = root / post.study / "0000"
    assert points(folder) == [(epoch, 100.0 + epoch, epoch / 10) for epoch in range(4)]
    assert [value for _, _, value in points(folder, "loss/train")] == [0.0, 0.2, 0.4, 0.6]
    [row] = rows(root)
    assert {key: value.WhichOneof("kind") for key, value in row.hparams.items()} == {
        "lr": "number_value", "model": "string_value", "deep": "bool_value",
    }  # fmt: skip
    assert (row.name, row.hparams["lr"].number_value) == (f"{post.study}/0000", 0.1)
    assert {value.name.tag: value.value for value in row.metric_values}["best_val_loss"] == 0.0
    session = row.sessions[0]
    assert (status_of(row), session.start_time_secs, session.end_time_secs) == ("STATUS_SUCCESS", 1.0, 5.0)
    texts = EventAccumulator(str(folder)).Reload().Tags()["tensors"]
    assert {"outcome", "about", "hpsearch.pruning"} <= set(texts)


def test_an_attempt_continues_the_event_history_of_the_previous_one(post: Post, root: Path) -> None:
    """It sends its epochs before the checkpoint again, with their times, and one epoch that it trained again."""
    first = post.open()
    log(first, range(3))
    post.consume(reader_of(post, root), first)
    again = post.open(attempt=2)
    log(again, range(2))
    log(again, range(2, 5), at=100.0)
    log(again, [], end=Outcome.PRUNED)
    assert post.consume(reader_of(post, root), again)
    folder = root / post.study / "0000"
    assert [(step, at) for step, at, _ in points(folder)] == [(0, 0), (1, 1), (2, 2), (3, 103), (4, 104)]
    assert [status_of(row) for row in rows(root)] == ["STATUS_SUCCESS"]
    assert len(list(folder.glob("events*"))) == 3


_WRITER = """
import os, signal, sys
from pathlib import Path
from hpsearch.storage.trackers.tensorboard.event_files import EventFiles
from hpsearch.storage.trackers.tensorboard.event_files import make_scalars
files = EventFiles(Path(sys.argv[1]))
for step in range(3):
    with files.lock():
        files.add(make_scalars({"loss/val": step / 10}), step=step, at=float(step))
        files.flush()
with next(Path(sys.argv[1]).glob("events*")).open("ab") as file:
    file.write(b"torn in the middle of an eve")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_events_of_a_killed_process_are_there_once_despite_a_torn_event(post: Post, root: Path) -> None:
    """It died after it wrote the events and before it stored its position, so the next reader repeats them."""
    folder = root / post.study / "0000"
    folder.parent.mkdir(parents=True)
    done = subprocess.run([sys.executable, "-c", _WRITER, str(folder)], cwd=Path.cwd(), check=False)
    assert done.returncode == -signal.SIGKILL
    journal = post.open()
    log(journal, range(5))
    journal.close()
    post.settle()
    [cursor] = post.left()
    assert reader_of(post, root).consume(cursor)
    assert [(step, value) for step, _, value in points(folder)] == [(epoch, epoch / 10) for epoch in range(5)]
    assert [status_of(row) for row in rows(root)] == ["STATUS_SUCCESS"]


def test_a_full_disk_leaves_no_torn_event(post: Post, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, journal = reader_of(post, root), post.open()
    log(journal, range(2))
    post.consume(reader, journal)
    write = os.write

    def torn(descriptor: int, data: bytes) -> int:
        if len(data) < 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:50] if descriptor != journal.descriptor else data)

    log(journal, [2])
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", torn)
        with pytest.raises(OSError, match="No space left") as failed:
            post.consume(reader, journal)
    failure = reader.classify_error(failed.value)
    assert (failure.is_transient, failure.text) == (True, f"{root}: No space left on device")
    post.consume(reader, journal)
    assert [step for step, _, _ in points(root / post.study / "0000")] == [0, 1, 2]


def test_an_event_file_started_on_a_full_disk_begins_with_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    files = EventFiles(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with files.lock():
            files.add(make_scalars({"loss/val": 0.5}), step=0, at=0.0)
            with pytest.raises(OSError, match="No space left"):
                files.flush()
    with files.lock():
        files.add(make_scalars({"loss/val": 0.5}), step=0, at=0.0)
        files.flush()
    [path] = tmp_path.glob("events*")
    assert Event.FromString(next(RawEventFileLoader(str(path)).Load())).file_version == "brain.Event:2"
    assert points(tmp_path) == [(0, 0.0, 0.5)]


@pytest.mark.parametrize("replaced", ["events", ".lock"])
def test_a_link_of_another_user_is_not_followed(tmp_path: Path, replaced: str) -> None:
    def write(step: int) -> None:
        with files.lock():
            files.add(make_scalars({"loss/val": 0.5}), step=step, at=0.0)
            files.flush()

    folder, precious = tmp_path / "0000", tmp_path / "precious"
    precious.write_text("mine")
    files = EventFiles(folder)
    write(0)
    [path] = folder.glob(f"{replaced}*")
    path.unlink()
    path.symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"):
        write(1)
    assert precious.read_text() == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link to another user")
@pytest.mark.parametrize("replaced", ["study", "trial"])
def test_a_link_of_another_user_in_place_of_a_folder_is_not_followed(
    post: Post, root: Path, tmp_path: Path, replaced: str
) -> None:
    private = tmp_path / "private"
    link = root / post.study / ("0000" if replaced == "trial" else "")
    for folder in (link.parent, private):
        folder.mkdir(parents=True)
    link.symlink_to(private)
    os.chown(link, 65534, -1, follow_symlinks=False)
    log(journal := post.open(), [0])
    with pytest.raises(OSError, match="is a link of another user"):
        post.consume(reader_of(post, root), journal)
    assert list(private.iterdir()) == []


def test_a_retried_trial_has_its_final_outcome(post: Post, root: Path) -> None:
    first = post.open()
    log(first, [0], end=Outcome.FAILED)
    assert post.consume(reader_of(post, root), first)
    assert [status_of(row) for row in rows(root)] == ["STATUS_FAILURE"]
    again = post.open(attempt=2)
    log(again, [0, 1])
    post.consume(reader := reader_of(post, root), again)
    assert [status_of(row) for row in rows(root)] == ["STATUS_UNKNOWN"], "it runs"
    log(again, [], end=Outcome.COMPLETE)
    assert post.consume(reader, again)
    assert [status_of(row) for row in rows(root)] == ["STATUS_SUCCESS"]
    assert [step for step, _, _ in points(root / post.study / "0000")] == [0, 1]


def test_the_end_of_a_superseded_attempt_does_not_end_the_trial(post: Post, root: Path) -> None:
    journal = post.open()
    log(journal, [0], end=Outcome.FAILED)
    post.begin_attempt(2)
    assert post.consume(reader_of(post, root), journal)
    assert [status_of(row) for row in rows(root)] == ["STATUS_UNKNOWN"], "it runs"


def test_a_recreated_study_has_another_folder(post: Post, root: Path) -> None:
    for owner in ("first", "second", "first"):
        journal = post.open()
        log(journal, range(2))
        post.consume(reader_of(post, root, owner), journal)
    assert sorted(path.name for path in root.iterdir()) == sorted([post.study, "second"])
    for name in (post.study, "second"):
        assert [step for step, _, _ in points(root / name / "0000")] == [0, 1]


def test_files_locked_by_a_frozen_process_are_not_written(post: Post, root: Path) -> None:
    journal = post.open()
    log(journal, [0])
    folder = root / post.study / "0000"
    files = EventFiles(folder)
    with files.lock(), pytest.raises(LockHeldError):
        post.consume(reader_of(post, root), journal)
    assert not post.consume(reader_of(post, root), journal)
    assert [step for step, _, _ in points(folder)] == [0]


def test_tensorboard_files_need_no_locks_or_links(post: Post, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = post.open()
    log(journal, [0])

    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    monkeypatch.setattr(os, "link", refused)
    assert not post.consume(reader_of(post, root), journal)
    assert [step for step, _, _ in points(root / post.study / "0000")] == [0]


def test_a_repeated_epoch_of_a_journal_is_written_once(post: Post, root: Path) -> None:
    journal = post.open()
    log(journal, [0, 1])
    journal.append(Epoch(1, 50.0, {"val_loss": 0.7}))
    post.consume(reader_of(post, root), journal)
    assert [(step, value) for step, _, value in points(root / post.study / "0000")] == [(0, 0.0), (1, 0.1)]


def test_an_uncreatable_folder_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError) as error:
        TensorBoardConsumer.check(str(tmp_path / "file" / "runs"))
    assert str(error.value) == (f"--tensorboard {tmp_path}/file/runs is not writable (Not a directory); choose another")
