"""Another user's process on the port of an embedded web service that has ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import mlflow
import pytest
from mlflow.exceptions import MlflowException

from hpsearch.storage import sockets
from hpsearch.storage.mlflow import credentials
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.mlflow.health import (
    TrackingUnavailableError,
    check_server,
    describe_error,
    is_retryable,
    is_unreachable,
)
from hpsearch.storage.mlflow.locations import LocationRejectedError
from tests.second_user import listen_as_second_user, needs_root

RUN = "0" * 32


@pytest.fixture(params=["port", pytest.param("former_ports", marks=pytest.mark.soak)])
def embedded_uri(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the address of the MLflow of a home, or its address before it was restarted on another port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    current, former = (port, []) if request.param == "port" else (1, [port])
    state = {"mlflow": {"port": current, "former_ports": former}, "dashboard": {"port": None}}
    (tmp_path / "stack.json").write_text(json.dumps(state))
    (tmp_path / "web-token").write_text("secret")
    monkeypatch.setenv("HPSEARCH_HOME", str(tmp_path))
    uri = f"http://127.0.0.1:{port}"
    monkeypatch.setattr(credentials, "_configured", {uri})
    return uri


@contextmanager
def _serve(uri: str, answer: object) -> Iterator[list[str | None]]:
    """Answer all requests of MLflow's API with a JSON object in this process, and yield the received credentials."""
    received: list[str | None] = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            received.append(self.headers["Authorization"])
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode() if self.path.startswith("/api") else b"OK")

        do_POST = do_GET  # noqa: N815 as http.server names it

    with ThreadingHTTPServer(("127.0.0.1", _port(uri)), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield received
        server.shutdown()


@contextmanager
def _take_port(uri: str, answer: object) -> Iterator[Callable[[], str]]:
    """Answer all requests as the second user, and yield a function that returns the received bytes."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    body = json.dumps(answer).encode()
    head = f"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"

    def serve(client: socket.socket) -> None:
        with client:
            os.write(writer, client.recv(1 << 16) or b"")
            client.sendall(head.encode() + body)

    def read_received() -> str:
        try:
            return os.read(reader, 1 << 16).decode()
        except BlockingIOError:
            return ""

    with listen_as_second_user(serve, port=_port(uri)):
        yield read_received
    os.close(reader)
    os.close(writer)


def _port(uri: str) -> int:
    return int(uri.rpartition(":")[2])


def _fails_as_if_down(call: Callable[[], object]) -> bool:
    with pytest.raises(MlflowException) as raised:
        call()
    assert "belongs to a process of another user" in describe_error(raised.value)
    return is_unreachable(raised.value) and is_retryable(raised.value)


@needs_root
def test_the_token_is_not_sent_right_after_another_user_has_taken_the_port(embedded_uri: str) -> None:
    client = Tracking(embedded_uri).client
    with _serve(embedded_uri, {}):
        assert client.search_experiments() == []
    with _take_port(embedded_uri, {}) as read_received:
        assert _fails_as_if_down(client.search_experiments)
        assert read_received() == ""


_PROGRAM = """
import sys, mlflow
try:
    mlflow.MlflowClient(sys.argv[1]).search_experiments()
except mlflow.exceptions.MlflowException as error:
    sys.exit("belongs to a process of another user" not in str(error))
sys.exit(1)
"""


@needs_root
def test_no_credentials_for_another_server_are_sent_to_a_taken_port(
    embedded_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "someone")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "elsewhere")
    with _take_port(embedded_uri, {}) as read_received:
        assert _fails_as_if_down(Tracking(embedded_uri).client.search_experiments)
        with pytest.raises(TrackingUnavailableError, match="belongs to a process of another user"):
            check_server(embedded_uri)
        environment = {**os.environ, "MLFLOW_TRACKING_AUTH": "", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
        subprocess.run([sys.executable, "-c", _PROGRAM, embedded_uri], env=environment, check=True)
        assert read_received() == ""


_PROXY_PROGRAM = """
import socket, sys, mlflow
def reach_no_proxy(*_, **__):
    raise OSError("the proxy does not answer")
socket.socket = socket.getaddrinfo = socket.create_connection = reach_no_proxy
mlflow.MlflowClient(sys.argv[1]).search_experiments()
"""


def test_an_embedded_server_is_reached_in_spite_of_replaced_sockets(embedded_uri: str) -> None:
    """Objectives replace them by those of a SOCKS proxy."""
    environment = {**os.environ, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    with _serve(embedded_uri, {}):
        subprocess.run([sys.executable, "-c", _PROXY_PROGRAM, embedded_uri], env=environment, check=True)


def test_credentials_for_another_server_are_not_sent_to_an_embedded_server(
    embedded_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the server needs no token."""
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "someone")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "elsewhere")
    (Path(os.environ["HPSEARCH_HOME"]) / "web-token").unlink()
    with _serve(embedded_uri, {}) as received:
        check_server(embedded_uri)
        Tracking(embedded_uri).client.search_experiments()
    assert received == [None, None, None]


def _make_run(folder: Path) -> object:
    info = {"run_id": RUN, "experiment_id": "0", "artifact_uri": f"file://{folder}", "lifecycle_stage": "active"}
    return {"run": {"info": info, "data": {}}}


@needs_root
def test_a_taken_port_does_not_write_artifacts_to_local_folders(embedded_uri: str, tmp_path: Path) -> None:
    file, private = tmp_path / "model", tmp_path / "private"
    file.write_text("new")
    private.mkdir()
    (private / "model").write_text("old")
    with _take_port(embedded_uri, _make_run(private)) as read_received:
        assert _fails_as_if_down(lambda: Tracking(embedded_uri).log_file(RUN, file))
        assert read_received() == ""
    assert (private / "model").read_text() == "old"


def test_an_embedded_server_names_no_local_folders(embedded_uri: str, tmp_path: Path) -> None:
    file = tmp_path / "model"
    file.write_text("new")
    rejected = pytest.raises(LocationRejectedError, match="is not a remote store")
    with _serve(embedded_uri, _make_run(tmp_path / "private")), rejected:
        Tracking(embedded_uri).log_file(RUN, file)
    assert not (tmp_path / "private").exists()


@needs_root
def test_another_users_mlflow_at_a_configured_address_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPSEARCH_HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
    with _take_port(uri, {}):
        assert mlflow.MlflowClient(uri).search_experiments() == []


@needs_root
@pytest.mark.parametrize("has_netlink", [True, False])
def test_the_user_of_a_server_is_found_with_and_without_netlink(
    has_netlink: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError

    if not has_netlink:
        monkeypatch.setattr(sockets, "_ask_netlink", fail)
    else:
        monkeypatch.setattr(sockets, "_read_table", lambda *_: None)
    with listen_as_second_user() as port, socket.create_connection(("127.0.0.1", port)) as client:
        assert sockets.find_server_users(port) == {65534}
        assert sockets.find_server_users(port, client.getsockname()[1]) == {65534}
    assert sockets.find_server_users(port) == set()
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            assert sockets.is_own_server(port, client.getsockname()[1])
            server.accept()[0].close()
            assert sockets.is_own_server(port, client.getsockname()[1])


@needs_root
def test_an_open_connection_to_another_user_is_detected_after_the_owner_has_bound_the_port() -> None:
    def close_listener(client: socket.socket) -> None:
        os.closerange(3, client.fileno())  # the listener too, which was opened before
        client.sendall(b"x")
        signal.pause()

    with listen_as_second_user(close_listener) as port, socket.create_connection(("127.0.0.1", port)) as client:
        assert client.recv(1) == b"x"
        with socket.create_server(("127.0.0.1", port)):
            assert sockets.is_own_server(port)
            assert not sockets.is_own_server(port, client.getsockname()[1])
