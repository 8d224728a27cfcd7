"""Journals on disk: appended records survive the process, and one process at a time owns a journal."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpsearch.storage.journals import journal as journals
from hpsearch.storage.journals.journal import JOURNAL_FILE, MLFLOW, Cursor, Journal
from hpsearch.storage.journals.journal_records import (
    End,
    Epoch,
    Header,
    Params,
    Problem,
    Released,
    Unknown,
    decode,
    encode,
)
from hpsearch.storage.journals.outbox import Outbox
from hpsearch.storage.trials.finishing import Outcome

HEAD = Header("s", trial=1, number=7, attempt=1, resumed=False, metric="val_loss", tags={})


@pytest.fixture
def box(tmp_path: Path) -> Outbox:
    return Outbox(tmp_path / "study")


def cursor(journal: Journal) -> Cursor:
    return journal.cursors[MLFLOW]


def values(journal: Journal) -> list[object]:
    return [entry.record.values for entry in cursor(journal).read_pending() if isinstance(entry.record, Params | Epoch)]


@contextmanager
def full_disk(journal: Journal) -> Iterator[None]:
    """Limit the journal's file to ten more bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (journal.path.stat().st_size + 10, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


_WRITER = """
import os, signal, sys
from pathlib import Path
from hpsearch.storage.journals.outbox import Outbox
from hpsearch.storage.journals.journal_records import Epoch, Header
journal = Outbox(Path(sys.argv[1])).open("0007-1", Header("s", 1, 7, 1, False, "val_loss", {}))
for epoch in range(50):
    journal.append(Epoch(epoch, 0.0, {"loss": 1 / 3}))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_loses_no_appended_record(box: Outbox) -> None:
    done = subprocess.run([sys.executable, "-c", _WRITER, str(box.folder)], cwd=Path.cwd(), check=False)
    assert done.returncode == -signal.SIGKILL
    [journal] = box.take_orphaned_journals()
    records = [entry.record for entry in cursor(journal).read_pending()]
    assert records == [HEAD, *(Epoch(epoch, 0.0, {"loss": 1 / 3}) for epoch in range(50))]
    assert journal.header == HEAD
    assert not journal.is_live


def test_a_journal_has_one_owner(box: Outbox) -> None:
    mine = box.open("0007-1", HEAD)
    assert list(box.take_orphaned_journals()) == []
    mine.close()
    [taken] = box.take_orphaned_journals()
    assert list(box.take_orphaned_journals()) == []
    taken.remove()
    assert box.count_journals() == 0


def test_a_torn_last_line_is_dropped(box: Outbox) -> None:
    journal = box.open("0007-1", HEAD)
    journal.append(Params({"lr": 0.1}))
    journal.close()
    with journal.path.open("ab") as file:
        file.write(b'{"kind":"params","values":{"torn')
    [left] = box.take_orphaned_journals()
    assert values(left) == [{"lr": 0.1}]


def test_a_pipe_is_not_stored_as_an_artifact(box: Outbox, tmp_path: Path) -> None:
    """Reading it would wait for a writer."""
    os.mkfifo(tmp_path / "pipe")
    assert not box.open("0007-1", HEAD).store_artifact(tmp_path / "pipe")


def test_an_empty_journal_is_removed(box: Outbox) -> None:
    (box.folder / "0001-1").mkdir(parents=True)
    (box.folder / "0001-1" / JOURNAL_FILE).write_bytes(b'{"kind":"open","numb')
    assert list(box.take_orphaned_journals()) == []
    assert box.count_journals() == 0


def test_nan_and_infinity_round_trip(box: Outbox) -> None:
    journal = box.open("0007-1", HEAD)
    journal.append(Epoch(0, 0.0, {"nan": math.nan, "up": math.inf, "down": -math.inf}))
    [found] = values(journal)
    assert isinstance(found, dict)
    assert math.isnan(found["nan"])
    assert (found["up"], found["down"]) == (math.inf, -math.inf)


# The format of journals on disk, also of those that earlier versions wrote.
LINES = {
    b'{"kind":"open","study":"s","trial":1,"number":7,"attempt":1,"resumed":false,"metric":"val_loss","tags":{},'
    b'"began":null}': HEAD,
    b'{"kind":"params","values":{"lr":0.1}}': Params({"lr": 0.1}),
    b'{"kind":"epoch","step":2,"at":1.5,"values":{"val_loss":0.5}}': Epoch(2, 1.5, {"val_loss": 0.5}),
    b'{"kind":"problem","text":"no room"}': Problem("no room"),
    b'{"kind":"leave"}': Released(),
    b'{"kind":"end","state":"PRUNED","reason":"r","at":2,"kept":true}': End(
        Outcome.PRUNED, "r", 2, is_checkpoint_kept=True
    ),
    b'{"kind":"end","state":"FAIL","reason":"r","at":2,"kept":false}': End(
        Outcome.FAILED, "r", 2, is_checkpoint_kept=False
    ),
}


@pytest.mark.parametrize("line", LINES)
def test_the_format_of_records_is_unchanged(line: bytes) -> None:
    assert decode(line) == LINES[line]
    assert encode(LINES[line]) == line + b"\n"


def test_records_of_another_version_are_read_as_far_as_known() -> None:
    assert decode(b'{"kind":"leave","why":"news"}') == Released()
    assert isinstance(decode(b'{"kind":"news"}'), Unknown)
    assert isinstance(decode(b'{"kind":"end","state":"NEWS","reason":"r","at":2,"kept":true}'), Unknown)


def test_sent_records_are_not_read_again_by_the_next_process(box: Outbox) -> None:
    journal = box.open("0007-1", HEAD)
    journal.append(Params({"lr": 0.1}))
    cursor(journal).position.run_id = "r"
    cursor(journal).commit(cursor(journal).read_pending())
    journal.append(Params({"epochs": 3}))
    journal.close()
    [left] = box.take_orphaned_journals()
    assert values(left) == [{"epochs": 3}]
    assert cursor(left).position.run_id == "r"


def test_a_full_disk_is_logged_once_and_records_are_written_later(
    box: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    journal = box.open("0007-1", HEAD)
    with full_disk(journal), caplog.at_level(logging.WARNING):
        for epoch in range(3):
            journal.append(Epoch(0, 0.0, {"epoch": epoch}))
        assert json.loads(journal.path.read_bytes()) == {"kind": "open", **vars(HEAD)}, (
            "no torn line stands in the file"
        )
        assert values(journal) == [{"epoch": epoch} for epoch in range(3)], "they can be sent all the same"
        cursor(journal).release_buffered_lines()
    assert [record.message for record in caplog.records if "cannot write" in record.message] == [
        f"{journal.path}: cannot write (File too large); records are kept in memory"
    ]
    journal.append(Epoch(0, 0.0, {"epoch": 3}))
    journal.close()
    [left] = box.take_orphaned_journals()
    assert values(left) == [{"epoch": epoch} for epoch in range(4)]


def test_records_sent_from_memory_are_not_written_later(box: Outbox) -> None:
    journal = box.open("0007-1", HEAD)
    with full_disk(journal):
        journal.append(Epoch(0, 0.0, {"epoch": 0}))
        entries = cursor(journal).read_pending()
        journal.append(Epoch(0, 0.0, {"epoch": 1}))  # while the sender has the first
        cursor(journal).commit(entries)
        cursor(journal).release_buffered_lines()
    journal.append(Epoch(0, 0.0, {"epoch": 2}))
    journal.close()
    [left] = box.take_orphaned_journals()
    assert values(left) == [{"epoch": 1}, {"epoch": 2}]


def test_memory_is_limited_and_losses_are_logged(
    box: Outbox, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "_MAX_BUFFER_BYTES", 1000)
    journal = box.open("0007-1", HEAD)
    with full_disk(journal):
        for epoch in range(100):
            journal.append(Epoch(0, 0.0, {"epoch": epoch}))
    assert 50 < journal.lost_records < 100
    assert sum("further records of the trial are dropped" in record.message for record in caplog.records) == 1


def test_queued_files_are_independent_of_the_original(box: Outbox, tmp_path: Path) -> None:
    journal = box.open("0007-1", HEAD)
    made = tmp_path / "best.pt"
    made.write_bytes(b"weights")
    assert journal.store_artifact(made, folder="checkpoints")
    made.unlink()
    assert (journal.artifact_folder / "checkpoints" / "best.pt").read_bytes() == b"weights"
    assert not journal.store_artifact(tmp_path / "gone")


def test_files_above_the_size_limit_are_not_queued(tmp_path: Path) -> None:
    box = Outbox(tmp_path / "study", limit_bytes=1000)
    journal = box.open("0007-1", HEAD)
    assert box.has_space()
    (tmp_path / "large").write_bytes(os.urandom(2000))
    journal.store_artifact(tmp_path / "large")
    assert not box.has_space()


def test_a_name_in_use_gets_a_number(box: Outbox) -> None:
    assert [box.open("0007-1", HEAD).name for _ in range(3)] == ["0007-1", "0007-1.2", "0007-1.3"]


def test_an_unwritable_folder_keeps_records_in_memory(tmp_path: Path) -> None:
    (tmp_path / "study").write_text("not a folder")
    journal = Outbox(tmp_path / "study").open("0007-1", HEAD)
    journal.append(Params({"lr": 0.1}))
    assert values(journal) == [{"lr": 0.1}]


def test_a_file_system_without_locks_keeps_records_in_memory(box: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    journal = box.open("0007-1", HEAD)
    journal.append(Params({"lr": 0.1}))
    assert values(journal) == [{"lr": 0.1}]
    assert list(box.folder.iterdir()) == []


def test_a_journal_during_its_removal_is_not_taken(box: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = box.open("0007-1", HEAD)
    taken: list[Journal] = []
    rmtree = shutil.rmtree

    def remove(path: Path, *, ignore_errors: bool) -> None:
        taken.extend(box.take_orphaned_journals())
        rmtree(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", remove)
    journal.remove()
    assert taken == []
    assert list(box.take_orphaned_journals()) == []


def test_a_journal_that_cannot_be_sent_is_kept_and_found(box: Outbox) -> None:
    for name in ("0001-1", "0002-1", "0003-1", "0004-1"):
        box.open(name, HEAD).close()
    (box.folder / "0001-1" / JOURNAL_FILE).unlink()
    (box.folder / "0002-1" / JOURNAL_FILE).write_bytes(b"\0damaged\n")
    (box.folder / "0003-1" / JOURNAL_FILE).write_bytes(b'{"rec')
    assert [journal.name for journal in box.take_orphaned_journals()] == ["0004-1"]
    assert [folder.name for folder in box.find_damaged()] == ["0001-1", "0002-1"]
