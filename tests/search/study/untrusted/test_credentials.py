"""The victim's credentials are not sent to addresses that a worker's role has stored."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hpsearch.search.cli import run_command
from hpsearch.search.services import find_services
from hpsearch.search.study.study import load_study
from hpsearch.search.study.study_tracking import resolve_tracking
from hpsearch.search.worker.options import WorkerOptions
from hpsearch.storage.attributes import CHECKPOINT_URL, RUN_ID, TRACKING_URI
from hpsearch.storage.errors import StorageError
from hpsearch.storage.mlflow import credentials
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.mlflow.health import check_server
from hpsearch.storage.study_storage.storage import PostgresStorage
from tests.search.study.untrusted.support import make_study


class Listener(ThreadingHTTPServer):
    """A tracking server of the attacker, which records the credentials that it receives."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Recorder)
        self.received: list[str | None] = []
        self.paths: list[str] = []
        self.target: str | None = None  # address to which it redirects requests
        self.redirected = "/api/"  # start of their paths; these are requests of MLflow's client

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Recorder(BaseHTTPRequestHandler):
    server: Listener

    def do_GET(self) -> None:
        self.server.received.append(self.headers["Authorization"])
        self.server.paths.append(self.path)
        is_redirected = self.server.target is not None and self.path.startswith(self.server.redirected)
        self.send_response(307 if is_redirected else 200)
        if is_redirected:
            self.send_header("Location", f"{self.server.target}{self.path}")
        self.end_headers()
        self.wfile.write(b"OK" if self.path == "/health" else b"{}")

    do_POST = do_PUT = do_GET  # noqa: N815 named by the base class

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


def test_a_client_opens_no_other_address_than_one_of_a_server(tmp_path: Path) -> None:
    """A worker's database role can store any address; MLflow would connect to a database, or create a file."""
    for uri in (f"sqlite:///{tmp_path}/planted.db", f"file://{tmp_path}", "postgresql://127.0.0.1:1/x"):
        with pytest.raises(StorageError, match=r"must be the http\(s\):// address"):
            Tracking(uri)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("home")
def test_workers_of_a_fleet_do_not_trust_an_address_from_the_study(
    storage: PostgresStorage, listener: Listener, database_url: str
) -> None:
    make_study(storage, **{TRACKING_URI: listener.uri})
    study = load_study(storage, "s")
    services = resolve_tracking(find_services({"storage_url": database_url}), study)
    options = WorkerOptions(**services.addresses)  # as `promote --refit` gives them to its workers
    assert resolve_tracking(find_services(options.addresses), study).tracking_uri == listener.uri
    assert not credentials.is_trusted_uri(listener.uri), "its artifact locations could be any folders of the worker"
    given = find_services({"storage_url": database_url, "tracking_uri": listener.uri})
    assert given.addresses["tracking_uri"] == listener.uri


@pytest.fixture
def netrc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Write credentials for localhost; restore MLflow's variables before `monkeypatch` restores those of a test."""
    credentials.restore_client()  # an earlier test may have changed MLflow's variables
    file = tmp_path / "netrc"
    file.write_text("machine localhost login admin password geheim\n")  # of all ports of this host
    file.chmod(0o600)
    monkeypatch.setenv("NETRC", str(file))
    yield
    credentials.restore_client()


@pytest.mark.usefixtures("home", "netrc")
def test_credentials_of_netrc_are_not_sent_by_a_redirect(
    storage: PostgresStorage, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_HTTP_REDIRECTS", "true")
    listener.target = f"http://localhost:{listener.server_port}"
    make_study(storage, **{TRACKING_URI: listener.uri, RUN_ID: "0" * 32})
    assert run_command(["show", "s"]) == 0
    assert any(path.startswith("/api/") for path in listener.paths)
    assert set(listener.received) == {None}
    credentials.allow_credentials(listener.uri)
    Tracking(listener.uri)
    assert os.environ["MLFLOW_ALLOW_HTTP_REDIRECTS"] == "true", "the user's value, for a server of the user"


@pytest.mark.usefixtures("home", "netrc")
def test_credentials_of_netrc_are_not_sent_without_mlflow_authentication(
    storage: PostgresStorage, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_AUTH", "")
    uri = f"http://localhost:{listener.server_port}"
    make_study(storage, **{TRACKING_URI: uri, RUN_ID: "0" * 32})
    assert run_command(["show", "s"]) == 0
    assert any(path.startswith("/api/") for path in listener.paths)
    assert set(listener.received) == {None}


def test_a_health_check_follows_redirects_of_a_configured_server_only(listener: Listener) -> None:
    listener.target, listener.redirected = f"http://localhost:{listener.server_port}/other", "/version"
    with pytest.raises(StorageError, match="redirects of a configured server only; set --tracking-uri http"):
        check_server(listener.uri)
    assert listener.paths == ["/health", "/version"]
    credentials.allow_credentials(listener.uri)
    check_server(listener.uri)
    assert listener.paths[2:] == ["/health", "/version", "/other/version"]


@pytest.mark.usefixtures("home", "netrc")
def test_credentials_of_netrc_are_not_sent_to_a_checkpoint_url_from_the_study(
    storage: PostgresStorage, listener: Listener
) -> None:
    make_study(storage, **{CHECKPOINT_URL: f"webhdfs://localhost:{listener.server_port}/x"})
    assert run_command(["doctor", "s"]) == 1
    assert listener.received
    assert set(listener.received) == {None}
