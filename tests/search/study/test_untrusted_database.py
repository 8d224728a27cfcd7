"""Attacks by a holder of the worker's database role, on the person who runs commands on the same database."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import optuna
import pytest

from hpsearch.search.cli import run_command
from hpsearch.search.study.cleanup import find_garbage
from hpsearch.search.study.study import load_study
from hpsearch.storage.attributes import CHECKPOINT_URL, FOLDER_NAME, RUN_ID, SPEC, TRACKING_URI
from hpsearch.storage.mlflow import credentials
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage
from tests.factories import spec_of

TOKEN = "0123456789abcdef"


@pytest.fixture
def storage(database_url: str) -> PostgresStorage:
    return open_storage(database_url, application_name="attacker")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database_url: str) -> Path:
    """Return the home folder of the victim, whose commands use the database of the attacker."""
    monkeypatch.setenv("HPSEARCH_STORAGE_URL", database_url)
    monkeypatch.setenv("HPSEARCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Return a folder with a file of the victim, which has the layout of a study's checkpoints."""
    file = tmp_path / f"s-{TOKEN}" / "0000" / "0001-1.pt"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"mine")
    return file


def make_study(storage: PostgresStorage, **attrs: Any) -> int:
    """Create a study as a worker's role can, with attributes of the attacker's choice and a finished trial."""
    study = optuna.create_study(study_name="s", storage=storage)
    for key, value in {SPEC: spec_of(name="none").model_dump(), **attrs}.items():
        storage.set_study_user_attr(study._study_id, key, value)
    study.add_trial(optuna.trial.create_trial(value=0.5))
    return study._study_id


def read_error(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the only line on stderr."""
    error = capsys.readouterr().err
    assert error.startswith("hpsearch: ")
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize("folder", ["../../victim", "victim", "", ".", "..", f"s-{TOKEN}/../../victim", f"s-{TOKEN}\n"])
def test_delete_rejects_folder_names_that_hpsearch_does_not_generate(
    home: Path, storage: PostgresStorage, tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    kept = tmp_path / "victim" / "file"
    kept.parent.mkdir()
    kept.touch()
    for name in ("runs", "outbox", "checkpoints"):
        (home / name / "victim").mkdir(parents=True)
    make_study(storage, **{FOLDER_NAME: folder})
    assert run_command(["delete", "s", "--yes"]) == 2
    assert "study 's' has the folder name" in read_error(capsys)
    assert run_command(["gc", "s", "--yes"]) == 2
    assert kept.exists()
    assert len(list(home.glob("*/victim"))) == 3
    load_study(storage, "s")


def test_delete_removes_checkpoints_only_below_configured_addresses(
    home: Path, storage: PostgresStorage, victim: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = victim.parents[2]
    make_study(storage, **{FOLDER_NAME: f"s-{TOKEN}", CHECKPOINT_URL: str(root)})
    assert run_command(["delete", "s", "--yes"]) == 2
    assert f"add --checkpoint-url {root}" in read_error(capsys)
    assert victim.exists()
    load_study(storage, "s")

    assert run_command(["delete", "s", "--yes", "--checkpoint-url", str(root)]) == 0
    assert not victim.exists()
    assert home.exists()


def test_gc_removes_checkpoints_only_below_configured_addresses(
    home: Path, storage: PostgresStorage, victim: Path
) -> None:
    root = str(victim.parents[2])
    make_study(storage, **{FOLDER_NAME: f"s-{TOKEN}", CHECKPOINT_URL: root})
    study = load_study(storage, "s")
    found, (problem,) = find_garbage(study, home=home, tracking=None)
    assert found == []
    assert f"add --checkpoint-url {root}" in problem
    (garbage,), problems = find_garbage(study, home=home, tracking=None, checkpoint_url=root)
    assert (garbage.size, problems) == (4, [])


@pytest.mark.parametrize("linked", ["", f"s-{TOKEN}", f"s-{TOKEN}/0000"])
def test_removal_does_not_follow_links(home: Path, storage: PostgresStorage, victim: Path, linked: str) -> None:
    root = victim.parents[2]
    link = home / "checkpoints" / (linked or "link")
    link.parent.mkdir(parents=True)
    link.symlink_to(root / linked)
    attrs = {FOLDER_NAME: f"s-{TOKEN}", **({} if linked else {CHECKPOINT_URL: str(link)})}
    make_study(storage, **attrs)
    run_command(["gc", "s", "--yes"])
    run_command(["delete", "s", "--yes"])
    assert victim.exists()


@pytest.mark.parametrize("url", ["~/x", "file://~/x", "x", "../x", "simplecache::s3://bucket/x"])
def test_stored_checkpoint_addresses_are_not_expanded(
    home: Path, storage: PostgresStorage, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    make_study(storage, **{FOLDER_NAME: f"s-{TOKEN}", CHECKPOINT_URL: url})
    assert run_command(["delete", "s", "--yes"]) == 2
    assert "neither an absolute path nor a URL" in read_error(capsys)
    assert home.exists()


def test_gc_keeps_files_that_are_not_checkpoints(home: Path, storage: PostgresStorage) -> None:
    folder = home / "checkpoints" / f"s-{TOKEN}" / "0000"
    folder.mkdir(parents=True)
    (folder / "notes.txt").touch()
    (folder / "0001-1.pt").touch()
    make_study(storage, **{FOLDER_NAME: f"s-{TOKEN}"})
    assert run_command(["gc", "s", "--yes"]) == 0
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


class Listener(ThreadingHTTPServer):
    """A tracking server of the attacker, which records the credentials that it receives."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Recorder)
        self.received: list[str | None] = []

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Recorder(BaseHTTPRequestHandler):
    server: Listener

    def do_GET(self) -> None:
        self.server.received.append(self.headers["Authorization"])
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"OK" if self.path == "/health" else b"{}")

    do_POST = do_GET  # noqa: N815 named by the base class

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    monkeypatch.setattr(credentials, "_configured", set[str]())
    server = Listener()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


SECRETS = (
    {"MLFLOW_TRACKING_USERNAME": "admin", "MLFLOW_TRACKING_PASSWORD": "geheim"},
    {"MLFLOW_TRACKING_TOKEN": "geheim"},
)
COMMANDS = (
    ("show", "s"),
    ("gc", "s", "--yes"),
    ("sync", "s"),
    ("promote", "s"),
    ("evaluate-test", "s", "--unconfirmed", "--trial", "0", "--yes"),
    ("worker", "--study", "s"),
    ("doctor", "s", "--json"),
)


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("secrets", SECRETS)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_credentials_are_not_sent_to_an_address_from_the_study(
    storage: PostgresStorage,
    listener: Listener,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
    secrets: dict[str, str],
) -> None:
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    make_study(storage, **{TRACKING_URI: listener.uri, RUN_ID: "0" * 32})
    code = run_command([*command])
    assert listener.received == []
    captured = capsys.readouterr()
    assert f"{listener.uri} is named only by the study, so the credentials in" in captured.out + captured.err
    assert "Traceback" not in captured.err
    assert "geheim" not in captured.out + captured.err
    assert code == {"show": 0, "doctor": 1}.get(command[0], 2)


@pytest.mark.usefixtures("home")
def test_credentials_are_not_sent_from_the_credentials_file_of_mlflow(
    storage: PostgresStorage, listener: Listener, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / ".mlflow" / "credentials"
    file.parent.mkdir()
    file.write_text("[mlflow]\nmlflow_tracking_username = admin\nmlflow_tracking_password = geheim\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    make_study(storage, **{TRACKING_URI: listener.uri, RUN_ID: "0" * 32})
    assert run_command(["show", "s"]) == 0
    assert listener.received == []


@pytest.mark.usefixtures("home")
def test_credentials_are_sent_to_a_configured_address(
    storage: PostgresStorage, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_study(storage, **{TRACKING_URI: listener.uri, RUN_ID: "0" * 32})
    assert run_command(["show", "s"]) == 0, "without credentials, the address of the study is used"
    assert set(listener.received) == {None}
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "geheim")
    run_command(["show", "s", "--tracking-uri", f"{listener.uri}/"])
    assert "Bearer geheim" in listener.received
