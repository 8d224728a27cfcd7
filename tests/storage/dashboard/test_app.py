from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from wsgiref.util import setup_testing_defaults

import optuna
import pytest
import waitress

from hpsearch.storage import dashboard
from hpsearch.storage.embedded import state
from hpsearch.storage.embedded.stack import StackInfo
from hpsearch.storage.errors import StorageError
from hpsearch.storage.study_storage.storage import PostgresStorage
from hpsearch.storage.web.server import serve_wsgi
from hpsearch.storage.web.token import find_token
from tests.web import answers


def _status(stack: StackInfo, method: str = "GET", path: str = "/api/meta", **headers: str) -> int:
    connection = http.client.HTTPConnection(stack.dashboard_url.removeprefix("http://"), timeout=300)
    try:
        token = {"Authorization": f"Bearer {find_token(stack.dashboard_url)}"}
        connection.request(method, path, headers=token | headers)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9999", "LOCALHOST", "[::1]:80"])
def test_requests_to_names_of_this_machine_are_accepted(stack: StackInfo, host: str) -> None:
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
def test_requests_from_foreign_pages_are_rejected(stack: StackInfo, headers: dict[str, str]) -> None:
    name = f"precious {headers}"
    study = optuna.create_study(study_name=name, storage=stack.storage_url)
    path = f"/api/studies/{study._study_id}"
    assert _status(stack, path=path, **headers) == 403
    assert _status(stack, "DELETE", path, **headers) == 403
    assert name in optuna.get_all_study_names(stack.storage_url)
    assert _status(stack, "DELETE", path) == 204
    assert name not in optuna.get_all_study_names(stack.storage_url)


@pytest.fixture
def read_only(database_url: str) -> Iterator[str]:
    """Serve a read-only dashboard as its command does, and return its address."""
    port = state.choose_port()
    arguments = [sys.executable, "-m", "hpsearch", "serve", "dashboard", "--port", str(port), "--read-only"]
    environment = {**os.environ, "HPSEARCH_STORAGE_URL": database_url, "HPSEARCH_WEB_TOKEN": "secret"}
    with subprocess.Popen(arguments, env=environment, cwd=Path(dashboard.__file__).parents[2]) as process:
        while not answers(port):
            assert process.poll() is None, "the dashboard ended"
            time.sleep(0.1)  # until it listens
        yield f"127.0.0.1:{port}"
        process.terminate()


def test_a_read_only_dashboard_shows_studies_and_rejects_changes(read_only: str, database_url: str) -> None:
    study = optuna.create_study(study_name="kept", storage=database_url)
    study.add_trial(optuna.trial.create_trial(value=1.0))
    path = f"/api/studies/{study._study_id}"

    def ask(method: str, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(read_only, timeout=300)
        headers = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
        connection.request(method, path, body=b"{}", headers=headers)
        response = connection.getresponse()
        return response.status, response.read()

    for shown in ("/dashboard", "/api/meta", "/api/studies", path, f"/csv/{study._study_id}"):
        assert ask("GET", shown)[0] == 200, shown
    assert ask("HEAD", "/dashboard")[0] == 200
    for method, changed in (
        ("DELETE", path),
        ("POST", "/api/studies"),
        ("POST", f"{path}/rename"),
        ("PUT", f"{path}/note"),
        ("PATCH", path),
    ):
        status, body = ask(method, changed)
        assert (status, json.loads(body)) == (403, {"reason": "This dashboard is read-only."}), (method, changed)
    assert optuna.get_all_study_names(database_url) == ["kept"]
    assert study._storage.get_study_system_attrs(study._study_id) == {}


def test_the_dashboard_uses_the_caching_storage(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import optuna_dashboard  # here because the import takes two seconds of the collection

    given: list[object] = []
    monkeypatch.setattr(optuna_dashboard, "wsgi", lambda storage, artifact_store: given.append(storage))
    dashboard._make_app(database_url, None)
    (storage,) = given
    assert isinstance(storage, PostgresStorage), "the bare RDBStorage reads every trial again for each request"


def test_infeasible_trials_are_neither_best_nor_on_the_pareto_front(database_url: str) -> None:
    def made(name: str, *values: tuple[float, ...]) -> dict[str, Any]:
        study = optuna.create_study(study_name=name, storage=database_url, directions=["maximize"] * len(values[0]))
        for number, each in enumerate(values):
            over = {"constraints:model_mb": 1.0 if number == 0 else -1.0}
            study.add_trial(optuna.trial.create_trial(values=list(each), system_attrs=over))
        environ: dict[str, Any] = {"PATH_INFO": f"/api/studies/{study._study_id}"}
        setup_testing_defaults(environ)
        body: dict[str, Any] = json.loads(b"".join(dashboard._make_app(database_url, None)(environ, lambda *_: None)))
        return body

    two = made("two", (3.0, 3.0), (2.0, 1.0), (1.0, 2.0), (1.0, 1.0))
    assert [trial["number"] for trial in two["best_trials"]] == [1, 2]
    assert [trial["constraints"] for trial in two["trials"]] == [[1.0], [-1.0], [-1.0], [-1.0]]
    assert [trial["number"] for trial in made("one", (3.0,), (1.0,), (2.0,))["best_trials"]] == [2]
    assert [trial["number"] for trial in made("none", (3.0,))["best_trials"]] == [0], "the best there is"


def test_stored_plots_are_not_shown(database_url: str) -> None:
    """The attribution of a map is HTML, which can open an address of another user."""
    from optuna_dashboard import save_note
    from optuna_dashboard._custom_plot_data import save_graph_object_json

    study = optuna.create_study(study_name="plots", storage=database_url)
    style = {"version": 8, "layers": [], "sources": {"a": {"attribution": '<meta http-equiv="refresh">'}}}
    plot = json.dumps({"data": [], "layout": {"map": {"style": style}}})
    save_graph_object_json(study._storage, study._study_id, "dashboard:plot_data:x:", plot)
    save_note(study, "a note")
    environ: dict[str, Any] = {"PATH_INFO": f"/api/studies/{study._study_id}"}
    setup_testing_defaults(environ)
    body = b"".join(dashboard._make_app(database_url, None)(environ, lambda *_: None))
    assert json.loads(body)["plotly_graph_objects"] == []
    assert b"a note" in body
    assert b"http-equiv" not in body


def test_a_port_in_use_is_named(database_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(StorageError, match=f"^--port {port} is in use on 127.0.0.1; choose another port"):
            dashboard.serve_dashboard(database_url, host="127.0.0.1", port=port)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "0.0.0.0"])
def test_requests_for_other_names_are_rejected_on_loopback_addresses(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """A web page can give a name of its own the address of this machine."""
    served = []
    monkeypatch.setattr(waitress, "create_server", lambda app, **_: served.append(app) or SimpleNamespace(run=int))

    def answer(_environ: dict[str, str], start_response: Any) -> list[bytes]:
        start_response("200 OK", [])
        return [b""]

    serve_wsgi(answer, host=host, port=1, token=None)
    statuses: list[str] = []
    for name in (host, "rebound.example"):
        setup_testing_defaults(environ := {"HTTP_HOST": f"{name}:1"})
        list(served[0](environ, lambda status, *_: statuses.append(status)))
    assert statuses == ["200 OK", "200 OK" if host == "0.0.0.0" else "403 Forbidden"]


def test_an_address_of_another_machine_is_an_error(database_url: str) -> None:
    with pytest.raises(StorageError, match=r"^cannot listen on --host '192\.0\.2\.1' --port 8080"):
        dashboard.serve_dashboard(database_url, host="192.0.2.1", port=8080)


def test_a_database_without_tables_is_named(empty_database_url: str) -> None:
    with pytest.raises(StorageError, match="run hpsearch migrate"):
        dashboard.serve_dashboard(empty_database_url, host="127.0.0.1", port=8080)
