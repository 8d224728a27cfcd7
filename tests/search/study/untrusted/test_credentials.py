"""The victim's credentials are not sent to addresses that a worker's role has stored."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hpsearch.search.cli import run_command
from hpsearch.storage.attributes import RUN_ID, TRACKING_URI
from hpsearch.storage.mlflow import credentials
from hpsearch.storage.study_storage.storage import PostgresStorage
from tests.search.study.untrusted.support import make_study


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
