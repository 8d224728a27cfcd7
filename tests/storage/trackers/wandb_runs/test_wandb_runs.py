"""From a journal to Weights & Biases in offline mode: the tests read its files back."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("wandb", reason="the package wandb is not installed")

from hpsearch.storage.database.locks import LockHeldError
from hpsearch.storage.errors import StorageError
from hpsearch.storage.journals.journal import Journal
from hpsearch.storage.journals.journal_records import Metrics, Params, Tags
from hpsearch.storage.journals.sender import Sender
from hpsearch.storage.trackers.wandb_runs.consumer import WandbConsumer
from hpsearch.storage.trackers.wandb_runs.process_client import Connection, WandbUnavailableError
from hpsearch.storage.trackers.wandb_runs.process_main import read_records
from hpsearch.storage.trials.finishing import Outcome
from tests.storage.journals.post import Post, log
from tests.storage.trackers.wandb_runs.history import rows

KEY = "a" * 40


@pytest.fixture
def post(database_url: str, tmp_path: Path) -> Post:
    return Post(database_url, tmp_path / "box", "wandb")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


class Readers(list[WandbConsumer]):
    def __init__(self, post: Post, home: Path) -> None:
        super().__init__()
        self.post, self.home = post, home

    def new(self) -> WandbConsumer:
        """Return a reader as in another process."""
        owner = f"{self.post.study}-0f0f"
        self.append(WandbConsumer("me/demo", self.post.study, owner, self.home, self.post.ends))
        return self[-1]

    @property
    def files(self) -> list[Path]:
        return sorted(self.home.glob("wandb/*/wandb/offline-run-*/*.wandb"))

    def rows(self) -> list[dict[str, Any]]:
        return [row for path in self.files for row in rows(path)]

    def steps(self) -> list[int]:
        return [row["_step"] for row in self.rows()]


@pytest.fixture
def readers(post: Post, tmp_path: Path) -> Iterator[Readers]:
    made = Readers(post, tmp_path)
    yield made
    for reader in made:
        reader.close()


def found(path: Path, kind: str) -> list[Any]:
    return [getattr(each, kind) for each in read_records(path) if each.WhichOneof("record_type") == kind]


def values(path: Path, kind: str) -> dict[str, str]:
    """Return the values in the records of a kind, the last one first."""
    return {item.key: item.value_json for record in found(path, kind) for item in record.update if item.key}


def test_a_trial_is_a_run_with_its_parameters_history_and_end(post: Post, readers: Readers) -> None:
    reader, journal = readers.new(), post.open()
    log(journal, range(2), at=100.0)
    assert not post.consume(reader, journal)
    journal.append(Metrics(60, 101.5, {"system/cpu_utilization_percentage": 50.0}))
    log(journal, [2], at=100.0)
    journal.append(Metrics(2, 102.0, {"best_val_loss": 0.0}))
    journal.append(Tags({"hpsearch.pruning": "{}"}))
    log(journal, [], end=Outcome.COMPLETE)
    assert post.consume(reader, journal)
    [path] = readers.files
    [run] = found(path, "run")
    names = (run.run_id, run.entity, run.project, run.run_group, run.display_name)
    assert names == (f"{post.study}-0f0f-0000", "me", "demo", post.study, f"{post.study}-0000")
    assert [(row["_step"], row["_timestamp"], row["val_loss"]) for row in rows(path)] == [
        (epoch, 100.0 + epoch, epoch / 10) for epoch in range(3)
    ]
    load = [row.get("system/cpu_utilization_percentage") for row in rows(path)]
    assert load == [None, None, 50.0], "with the next epoch, for its steps are seconds"
    config, summary = values(path, "config"), values(path, "summary")
    assert (config["lr"], config["model"], config["hpsearch.pruning"]) == ("0.1", '"mlp"', '"{}"')
    assert (summary["best_val_loss"], summary["state"], summary["reason"]) == ("0.0", '"complete"', '"as it goes"')
    assert [end.exit_code for end in found(path, "exit")] == [0]


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (Outcome.PRUNED, 0),
        pytest.param(Outcome.FAILED, 1, marks=pytest.mark.soak),
        pytest.param(Outcome.LOST, 1, marks=pytest.mark.soak),
        pytest.param(Outcome.CANCELLED, 1, marks=pytest.mark.soak),
    ],
)
def test_a_run_has_the_outcome_of_its_trial(post: Post, readers: Readers, outcome: Outcome, code: int) -> None:
    journal = post.open()
    log(journal, [0], end=outcome)
    assert post.consume(readers.new(), journal)
    [path] = readers.files
    assert [end.exit_code for end in found(path, "exit")] == [code]
    assert values(path, "summary")["state"] == f'"{outcome.run_state}"'


def test_an_attempt_continues_the_run_of_the_previous_one(post: Post, readers: Readers) -> None:
    first = post.open()
    log(first, range(3), end=Outcome.RELEASED)
    assert post.consume(readers.new(), first)
    again = post.open(attempt=2)
    log(again, range(2))
    log(again, range(2, 5), at=100.0, end=Outcome.COMPLETE)
    assert post.consume(readers.new(), again)
    assert readers.steps() == [0, 1, 2, 3, 4]
    assert len({run.run_id for path in readers.files for run in found(path, "run")}) == 1
    assert [len(found(path, "preempting")) for path in readers.files] == [1, 0]


def test_a_parameter_cannot_name_a_server_to_which_the_key_is_sent(
    post: Post, readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A holder of a worker's database role can store any parameter."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        text = f"wandb-artifact://http://127.0.0.1:{server.getsockname()[1]}/_id/QQ"
        journal = post.open()
        journal.append(Params({"note": text, "kept": "wandb"}))
        log(journal, [0], end=Outcome.COMPLETE)
        assert post.consume(readers.new(), journal)
        with pytest.raises(BlockingIOError):
            server.accept()
    config = values(readers.files[0], "config")
    assert (config["note"], config["kept"]) == (json.dumps(f"'{text}"), '"wandb"')


def children() -> dict[int, str]:
    """Return all descendants of this process, with their command lines."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            found[process.pid] = " ".join(process.cmdline())
    return found


def ship_at_last(post: Post, reader: WandbConsumer, journal: Journal) -> None:
    """Send all records of a journal, with retries."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        with suppress(WandbUnavailableError, LockHeldError):
            assert post.consume(reader, journal)
            return
        time.sleep(0.05)
    raise AssertionError("waited in vain")


@pytest.mark.soak
@pytest.mark.parametrize("victim", ["process", "service"])
def test_a_killed_process_loses_and_duplicates_nothing(post: Post, readers: Readers, victim: str) -> None:
    """The package's own service may be killed too: the run is sent again, except for the records in its files."""
    before = children()
    reader, journal = readers.new(), post.open()
    log(journal, range(3))
    assert not post.consume(reader, journal)
    named = {"process": "hpsearch.storage.trackers.wandb_runs.process_main", "service": "wandb-core"}[victim]
    [found_one] = [pid for pid, command in children().items() if pid not in before and named in command]
    os.kill(found_one, signal.SIGKILL)
    log(journal, [3], end=Outcome.COMPLETE)
    ship_at_last(post, reader, journal)
    assert sorted(readers.steps()) == [0, 1, 2, 3]
    assert len({run.run_id for path in readers.files for run in found(path, "run")}) == 1


_PUPPET = """
import os, signal, sys
from pathlib import Path
from hpsearch.storage.trackers.wandb_runs.process_client import Connection
line = Connection(Path(sys.argv[1]))
assert line.request(120, "open", run_id="x", folder=sys.argv[1], project="p", config={}) == {}
line.request(120, "log_rows", run_id="x", config={}, rows=[[0, {"a": 1}], [1, {"a": 2}]], summary={})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.soak
def test_records_of_a_killed_worker_are_written_and_its_run_released(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    done = subprocess.run([sys.executable, "-c", _PUPPET, str(folder)], cwd=Path.cwd(), check=False)
    assert done.returncode == -signal.SIGKILL
    line, deadline = Connection(folder), time.monotonic() + 300
    while line.request(120, "open", run_id="x", folder=str(folder), project="p", config={}).get("busy"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    line.request(120, "log_rows", run_id="x", config={}, rows=[[1, {"a": 2}], [2, {"a": 3}]], summary={})
    line.request(120, "finish", run_id="x", exit_code=0, is_preempted=False)
    line.close()
    found = [row["_step"] for path in folder.glob("wandb/offline-run-*/*.wandb") for row in rows(path)]
    assert sorted(found) == [0, 1, 2]


@pytest.mark.soak
def test_records_of_a_dead_process_are_sent_with_the_outcome_of_the_trial(post: Post, readers: Readers) -> None:
    journal = post.open()
    log(journal, range(3))
    journal.close()
    post.settle("PRUNED")
    [cursor] = post.left()
    assert readers.new().consume(cursor)
    assert readers.steps() == [0, 1, 2]
    [path] = readers.files
    assert values(path, "summary")["state"] == '"pruned"'


@pytest.mark.soak
def test_a_run_of_another_process_is_not_written(post: Post, readers: Readers) -> None:
    first, again = readers.new(), readers.new()
    journal = post.open()
    log(journal, [0])
    assert not post.consume(first, journal)
    later = post.open(attempt=2)
    log(later, [0, 1], end=Outcome.COMPLETE)
    with pytest.raises(LockHeldError):
        post.consume(again, later)
    first.close()
    ship_at_last(post, again, later)
    assert readers.steps() == [0, 1]


@pytest.mark.soak
def test_an_unreachable_server_is_retried(post: Post, readers: Readers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Port 9 of this machine is closed."""
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    journal = post.open()
    log(journal, range(3), end=Outcome.COMPLETE)
    sender = Sender(post.box, [readers.new()])
    sender.start()
    sender.add(journal)
    assert sender.flush(300.0) == 1
    assert sender.unavailable_reason == "http://127.0.0.1:9: no answer ([Errno 111] Connection refused)"
    sender.close()
    monkeypatch.setenv("WANDB_MODE", "offline")
    again = Sender(post.box, [readers.new()])
    again.start()
    assert again.flush(300.0) == 0
    again.close()
    assert readers.steps() == [0, 1, 2]


@pytest.mark.parametrize(
    ("environment", "netrc", "known"),
    [
        ({}, "", False),
        ({"WANDB_API_KEY": KEY}, "", True),
        ({}, f"machine api.wandb.ai login user password {KEY}", True),
        ({}, f"machine example.org login user password {KEY}", False),
        ({}, f"default login user password {KEY}", False),
        ({"WANDB_BASE_URL": "https://own.example.org"}, f"machine api.wandb.ai login user password {KEY}", False),
        ({"WANDB_BASE_URL": "https://own.example.org"}, f"machine own.example.org login u password {KEY}", True),
        ({"WANDB_MODE": "offline"}, "", True),
    ],
)
def test_a_missing_api_key_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, environment: dict[str, str], netrc: str, known: bool
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    (tmp_path / "netrc").write_text(netrc)
    (tmp_path / "netrc").chmod(0o600)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if known:
        WandbConsumer.check("me/demo")
        return
    with pytest.raises(StorageError) as error:
        WandbConsumer.check("me/demo")
    assert str(error.value) == (
        "--wandb me/demo: no API key of Weights & Biases; set WANDB_API_KEY or WANDB_API_KEY_FILE, run wandb login, "
        "or set WANDB_MODE=offline and send the runs later with wandb sync"
    )


@pytest.mark.soak
def test_records_of_several_blocks_are_read_completely(tmp_path: Path) -> None:
    line = Connection(tmp_path)
    assert line.request(120, "open", run_id="x", folder=str(tmp_path), project="p", config={}) == {}
    many = [[step, {"long": "x" * 20_000, "step": step}] for step in range(20)]
    line.request(120, "log_rows", run_id="x", config={}, rows=many, summary={})
    line.request(120, "finish", run_id="x", exit_code=0, is_preempted=False)
    line.close()
    [path] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert [(row["_step"], len(row["long"])) for row in rows(path)] == [(step, 20_000) for step in range(20)]
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    torn = [row["_step"] for row in rows(path)]
    assert torn == list(range(len(torn)))
    assert 5 < len(torn) < 20


def test_settings_in_the_working_folder_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B reads wandb/settings, which could name another server for the key."""
    (tmp_path / "repository").mkdir()
    monkeypatch.chdir(tmp_path / "repository")
    line = Connection(tmp_path / "own")
    process, _ = line._start()
    try:
        assert psutil.Process(process.pid).cwd() == str(tmp_path / "own")
    finally:
        line.close()
