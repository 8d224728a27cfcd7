from __future__ import annotations

import http.client
import socket

import optuna
import pytest

from storage.dashboard import app
from storage.embedded.stack import StackInfo
from storage.errors import StorageError
from storage.study_storage import PostgresStorage


def _status(stack: StackInfo, method: str = "GET", path: str = "/api/meta", **headers: str) -> int:
    connection = http.client.HTTPConnection(stack.dashboard_url.removeprefix("http://"), timeout=300)
    try:
        connection.request(method, path, headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9999", "LOCALHOST", "[::1]:80"])
def test_names_of_this_machine_are_answered(stack: StackInfo, host: str) -> None:
    assert _status(stack, Host=host) == 200
    assert _status(stack, Host=host, Origin=f"http://{host}") == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},  # DNS rebinding: a foreign name that points here
        {"Host": "127.0.0.1.evil.example"},
        {"Host": ""},
        {"Host": "[::1"},
        {"Origin": "http://evil.example"},  # a foreign page that posts here
        {"Origin": "null"},
    ],
)
def test_foreign_pages_are_refused(stack: StackInfo, headers: dict[str, str]) -> None:
    name = f"precious {headers}"
    study = optuna.create_study(study_name=name, storage=stack.storage_url)
    path = f"/api/studies/{study._study_id}"
    assert _status(stack, path=path, **headers) == 403
    assert _status(stack, "DELETE", path, **headers) == 403
    assert name in optuna.get_all_study_names(stack.storage_url)
    assert _status(stack, "DELETE", path) == 204
    assert name not in optuna.get_all_study_names(stack.storage_url)


def test_it_reads_through_a_cache(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import optuna_dashboard  # two seconds of whoever collects the tests otherwise

    given: list[object] = []
    monkeypatch.setattr(optuna_dashboard, "wsgi", lambda storage, artifact_store: given.append(storage))
    app._application(database_url, None)
    (storage,) = given
    assert isinstance(storage, PostgresStorage), "the bare RDBStorage reads every trial anew for each request"


def test_a_port_in_use_is_named(database_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(StorageError, match=f"^--port {port} is in use on 127.0.0.1: choose another"):
            app.serve_dashboard(database_url, host="127.0.0.1", port=port)


def test_an_address_of_another_machine(database_url: str) -> None:
    with pytest.raises(StorageError, match=r"^--host '192\.0\.2\.1' --port 8080 cannot be listened on"):
        app.serve_dashboard(database_url, host="192.0.2.1", port=8080)


def test_a_database_without_tables_is_named(empty_database_url: str) -> None:
    with pytest.raises(StorageError, match="run hpsearch migrate"):
        app.serve_dashboard(empty_database_url, host="127.0.0.1", port=8080)
