"""Tests that need a server: a run is resumed on its server, and is sent after an outage of the server."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

pytest.importorskip("wandb", reason="the package wandb is not installed")

from hpsearch.storage.database.locks import LockHeldError
from hpsearch.storage.journals.journal import Journal
from hpsearch.storage.trackers.wandb_runs import consumer as wandb_consumer
from hpsearch.storage.trackers.wandb_runs.consumer import WandbConsumer
from hpsearch.storage.trackers.wandb_runs.process_client import WandbUnavailableError
from hpsearch.storage.trials.finishing import Outcome
from tests.storage.journals.post import Post, log
from tests.storage.trackers.wandb_runs.fake_server import FakeServer, fake_server
from tests.waiting import wait_for

KEY = "a" * 40


@pytest.fixture
def post(database_url: str, tmp_path: Path) -> Post:
    return Post(database_url, tmp_path / "box", "wandb")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeServer]:
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with fake_server() as found:
        monkeypatch.setenv("WANDB_BASE_URL", found.url)
        yield found


@pytest.fixture
def new_reader(post: Post, server: FakeServer, tmp_path: Path) -> Iterator[Callable[[], WandbConsumer]]:
    """Return a function that creates a reader as in another process."""
    made: list[WandbConsumer] = []

    def new() -> WandbConsumer:
        made.append(WandbConsumer("me/demo", post.study, "owner", tmp_path, post.ends))
        return made[-1]

    yield new
    for reader in made:
        reader.close()


def ship_at_last(post: Post, reader: WandbConsumer, journal: Journal) -> None:
    """Send all records of a journal, with retries."""

    def shipped() -> bool:
        with suppress(WandbUnavailableError, LockHeldError):
            return post.consume(reader, journal)
        return False

    wait_for(shipped, "all of the journal")


@pytest.mark.soak
def test_a_resumed_trial_continues_its_run(
    post: Post, server: FakeServer, new_reader: Callable[[], WandbConsumer]
) -> None:
    """All processes of the first attempt are killed when the server has its epochs; the second sends them again."""
    first = post.open()
    log(first, range(3))
    assert not post.consume(new_reader(), first)
    [run] = server.runs.values()
    wait_for(lambda: run.steps == [0, 1, 2], "all epochs")
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            if "wandb" in " ".join(process.cmdline()):
                process.kill()
    again = post.open(attempt=2)
    log(again, range(2))
    log(again, range(2, 5), at=100.0, end=Outcome.COMPLETE)
    ship_at_last(post, new_reader(), again)
    assert list(server.runs) == ["owner-0000"]
    assert run.steps == [0, 1, 2, 3, 4]
    assert (run.summary["state"], run.exit_codes[-1]) == ("complete", 0)
    assert (run.settings["groupName"], run.settings["displayName"]) == (post.study, f"{post.study}-0000")


@pytest.mark.soak
def test_an_outage_during_a_run_sends_all_records_once(
    post: Post, server: FakeServer, new_reader: Callable[[], WandbConsumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, journal = new_reader(), post.open()
    log(journal, range(2))
    assert not post.consume(reader, journal)
    [run] = server.runs.values()
    wait_for(lambda: run.steps == [0, 1], "the epochs before")
    server.away = True
    log(journal, range(2, 4), end=Outcome.PRUNED)
    with monkeypatch.context() as patch:
        patch.setattr(wandb_consumer, "_FINISH_SECONDS", 3.0)
        with pytest.raises(WandbUnavailableError) as error:
            post.consume(reader, journal)
    assert reader.classify_error(error.value).is_transient
    assert journal.cursors["wandb"].position.offset == 0, "no record counts as sent"
    server.away = False
    ship_at_last(post, reader, journal)
    assert run.steps == [0, 1, 2, 3]
    assert (run.summary["state"], run.exit_codes[-1]) == ("pruned", 0)
