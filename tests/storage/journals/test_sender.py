"""Several readers of one journal: each has its own position, and the journal is kept until all have it."""

from __future__ import annotations

import json
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpsearch.storage.database.locks import LockHeldError
from hpsearch.storage.errors import ServiceUnavailableError
from hpsearch.storage.journals.consumer import Consumer, Failure, OutcomePendingError, TrialOutcomes
from hpsearch.storage.journals.journal import MLFLOW, Cursor, Journal, JournalEntry, get_position_file_name
from hpsearch.storage.journals.journal_records import End, Epoch, Header, Record, Released
from hpsearch.storage.journals.outbox import Outbox
from hpsearch.storage.journals.sender import Sender
from hpsearch.storage.trials.finishing import TrialEnd
from tests.waiting import wait_for

HEAD = Header("s", trial=1, number=7, attempt=1, resumed=False, metric="val_loss", tags={})
READERS = (MLFLOW, "second")


class NoEnds(TrialOutcomes):
    """A fake database in which no trial has ended."""

    def __init__(self) -> None: ...

    def is_superseded(self, trial_id: int, attempt: int) -> bool:
        return False

    def read_outcome(self, trial_id: int) -> TrialEnd | None:
        return None


class Listener(Consumer):
    """A reader that keeps its records, or raises `error` if it is set."""

    def __init__(self, name: str) -> None:
        super().__init__(NoEnds())
        self.name = self.title = name
        self.records: list[Record] = []
        self.error: Exception | None = None
        self.asked = 0
        self.hangs = threading.Event()
        self.hangs.set()

    def consume(self, cursor: Cursor) -> bool:
        self.asked += 1
        self.hangs.wait()
        if self.error is not None:
            raise self.error
        return super().consume(cursor)

    def write_records(self, cursor: Cursor, entries: Sequence[JournalEntry]) -> bool:
        self.records += [entry.record for entry in entries]
        cursor.commit(entries)
        return any(isinstance(entry.record, Released) for entry in entries)

    def write_outcome(self, cursor: Cursor, end: End) -> None: ...

    def release(self, cursor: Cursor) -> None: ...

    def classify_error(self, error: Exception) -> Failure:
        return Failure(str(error), is_transient=isinstance(error, ServiceUnavailableError), is_service_down=True)

    def on_rejected(self, cursor: Cursor) -> None: ...

    def close(self) -> None: ...

    @property
    def steps(self) -> list[int]:
        return [record.step for record in self.records if isinstance(record, Epoch)]


@pytest.fixture
def box(tmp_path: Path) -> Outbox:
    return Outbox(tmp_path / "study", READERS)


@pytest.fixture
def listeners() -> Iterator[tuple[Listener, Listener]]:
    made = Listener(READERS[0]), Listener(READERS[1])
    yield made
    for one in made:
        one.hangs.set()


@pytest.fixture
def begin(box: Outbox, listeners: tuple[Listener, Listener]) -> Iterator[Callable[..., Sender]]:
    senders = []

    def made(*, should_retry_rejected: bool = False) -> Sender:
        senders.append(Sender(box, listeners, should_retry_rejected=should_retry_rejected))
        senders[-1].start()
        return senders[-1]

    yield made
    for listener in listeners:
        listener.hangs.set()
    for sender in senders:
        sender.close()


def write(journal: Journal, epochs: int, *, end: bool = True) -> None:
    for epoch in range(epochs):
        journal.append(Epoch(epoch, float(epoch), {"val_loss": 1.0}))
    if end:
        journal.append(Released())


def test_a_journal_is_removed_after_all_readers_have_it(
    box: Outbox, listeners: tuple[Listener, Listener], begin: Callable[..., Sender]
) -> None:
    sender = begin()
    journal = box.open("0007-1", HEAD)
    sender.add(journal)
    write(journal, 3)
    assert sender.flush(60.0) == 0
    assert [listener.steps for listener in listeners] == [[0, 1, 2]] * 2
    sender.add(second := box.open("0007-2", HEAD))  # a later attempt of the same trial
    write(second, 0)
    assert sender.flush(60.0) == 0
    assert (box.count_journals(), sender.sent_trial_numbers) == (0, {"0007"})


@pytest.mark.parametrize("away", [0, 1])
def test_an_unreachable_or_hanging_reader_blocks_no_other(
    box: Outbox, listeners: tuple[Listener, Listener], begin: Callable[..., Sender], away: int
) -> None:
    there, gone = listeners[1 - away], listeners[away]
    gone.error = ServiceUnavailableError("no answer")
    sender = begin()
    first, second = box.open("0007-1", HEAD), box.open("0008-1", HEAD)
    sender.add(first)
    write(first, 3)
    wait_for(lambda: there.steps == [0, 1, 2] and gone.asked, "both readers")
    assert sender.flush(60.0) == 1
    assert sender.lagging_consumers == gone.title
    assert sender.unavailable_reason == f"{gone.title}: no answer"
    gone.hangs.clear()
    asked = gone.asked
    wait_for(lambda: gone.asked > asked, "another try")
    sender.add(second)
    write(second, 2)
    wait_for(lambda: there.steps == [0, 1, 2, 0, 1], "the second trial")
    assert box.count_journals() == 2, "the other reader still needs it"
    gone.error = None
    gone.hangs.set()
    assert sender.flush(60.0) == 0
    assert gone.steps == [0, 1, 2, 0, 1]
    assert box.count_journals() == 0


def test_the_next_process_does_not_repeat_a_completed_reader(
    box: Outbox, listeners: tuple[Listener, Listener], begin: Callable[..., Sender]
) -> None:
    listeners[1].error = ServiceUnavailableError("no answer")
    sender = begin()
    journal = box.open("0007-1", HEAD)
    sender.add(journal)
    write(journal, 3)
    sent = journal.folder / get_position_file_name(MLFLOW)
    wait_for(lambda: sent.exists() and json.loads(sent.read_text())["over"], "the end of the journal")
    sender.close()
    listeners[1].error = None
    assert begin().flush(60.0) == 0
    assert [listener.steps for listener in listeners] == [[0, 1, 2]] * 2
    assert box.count_journals() == 0


def test_a_journal_of_a_version_with_one_reader_is_sent_to_all(
    box: Outbox, listeners: tuple[Listener, Listener], begin: Callable[..., Sender]
) -> None:
    old = Outbox(box.folder).open("0007-1", HEAD)
    write(old, 3)
    entries = old.cursors[MLFLOW].read_pending()
    old.cursors[MLFLOW].commit(entries[:3])
    text = (old.folder / "sent.json").read_text()
    (old.folder / "sent.json").write_text(json.dumps({k: v for k, v in json.loads(text).items() if k != "over"}))
    old.close()
    assert begin().flush(60.0) == 0
    assert [listener.steps for listener in listeners] == [[2], [0, 1, 2]]
    assert box.count_journals() == 0


def test_rejected_records_are_kept_for_their_reader_until_a_retry(
    box: Outbox, listeners: tuple[Listener, Listener], begin: Callable[..., Sender]
) -> None:
    listeners[0].error = ValueError("not this")
    sender = begin()
    journal = box.open("0007-1", HEAD)
    sender.add(journal)
    write(journal, 3)
    assert sender.flush(60.0) == 0
    sender.close()
    assert listeners[1].steps == [0, 1, 2]
    assert box.count_journals() == 1
    listeners[0].error = None
    again = begin()
    assert again.flush(60.0) == 0
    assert listeners[0].steps == [], "it is not tried again unasked"
    again.close()
    listeners[0].error, listeners[0].asked = ValueError("not this"), 0
    retry = begin(should_retry_rejected=True)
    assert retry.flush(60.0) == retry.flush(60.0) == 0
    assert listeners[0].asked == 1, "a second rejection is final"
    retry.close()
    listeners[0].error = None
    assert begin(should_retry_rejected=True).flush(60.0) == 0
    assert [listener.steps for listener in listeners] == [[0, 1, 2]] * 2
    assert box.count_journals() == 0


@pytest.mark.parametrize("error", [OutcomePendingError(), LockHeldError("held")])
def test_records_too_early_for_a_reader_are_offered_again(
    box: Outbox, listeners: tuple[Listener, Listener], begin: Callable[..., Sender], error: Exception
) -> None:
    journal = box.open("0007-1", HEAD)
    write(journal, 3)
    journal.close()
    listeners[0].error, listeners[1].error = error, ServiceUnavailableError("no answer")
    sender = begin()
    wait_for(lambda: listeners[0].asked and listeners[1].asked, "both readers")
    listeners[0].error = None
    sender.flush(60.0)
    wait_for(lambda: listeners[0].steps == [0, 1, 2], "all epochs")
    assert box.count_journals() == 1


@contextmanager
def full_disk(journal: Journal) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (journal.path.stat().st_size + 10, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def read_steps(cursor: Cursor) -> list[int]:
    """Return the steps of the pending records and commit these."""
    entries = cursor.read_pending()
    cursor.commit(entries)
    cursor.release_buffered_lines()
    return [entry.record.step for entry in entries if isinstance(entry.record, Epoch)]


def test_each_reader_gets_every_record_once_despite_a_full_disk(box: Outbox) -> None:
    """One reads from memory, the other from the disk when there is room. Records that both have are never written."""
    journal = box.open("0007-1", HEAD)
    first, second = (journal.cursors[name] for name in READERS)
    with full_disk(journal):
        write(journal, 2, end=False)
        assert read_steps(first) == [0, 1]
        assert read_steps(second) == [0, 1]
        journal.append(Epoch(2, 2.0, {}))
        assert read_steps(first) == [2]
    journal.append(Epoch(3, 3.0, {}))
    assert read_steps(first) == [3]
    assert read_steps(second) == [2, 3]
    assert read_steps(second) == []
    journal.close()
    [left] = box.take_orphaned_journals()
    assert [read_steps(left.cursors[name]) for name in READERS] == [[], []]


def test_unconfirmed_records_are_read_again(box: Outbox) -> None:
    journal = box.open("0007-1", HEAD)
    write(journal, 2, end=False)
    cursor = journal.cursors["second"]
    entries = cursor.read_pending()
    cursor.mark_in_flight(entries)
    cursor.release_buffered_lines()
    assert cursor.read_pending() == []
    cursor.rewind()
    assert cursor.read_pending() == entries
    cursor.mark_in_flight(entries)
    cursor.commit_in_flight()
    journal.close()
    [left] = box.take_orphaned_journals()
    assert left.cursors["second"].read_pending() == []
    assert len(left.cursors[MLFLOW].read_pending()) == 3
