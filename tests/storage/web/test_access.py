"""Attacks on the web services of a running stack, and the ways in which their user reaches them."""

from __future__ import annotations

import asyncio
import base64
import errno
import hashlib
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import mlflow
import psycopg2
import pytest
from sqlalchemy import text

from hpsearch.storage.database.connect import make_engine
from hpsearch.storage.embedded import stack as embedded
from hpsearch.storage.embedded.postgres import make_database_url
from hpsearch.storage.embedded.stack import StackInfo
from hpsearch.storage.embedded.state import ServiceRecord
from hpsearch.storage.embedded.web_service import WebService
from hpsearch.storage.sockets import find_client_user, is_own_server
from hpsearch.storage.web.guard import SERVER_END, Guard, Reply, Request, ServerEnd, guard_asgi, guard_wsgi, make_reply
from hpsearch.storage.web.token import add_token, add_tokens, find_token, read_token
from tests.second_user import act_as_second_user, listen_as_second_user, needs_root
from tests.storage.web.support import send_request
from tests.web import open_url

# Each is (service, method, path, body): what a program without the token may try.
_ATTACKS = [
    ("mlflow", "POST", "/api/2.0/mlflow/experiments/create", {"name": "theirs"}),
    ("mlflow", "POST", "/ajax-api/2.0/mlflow/runs/delete", {"run_id": "0"}),
    ("mlflow", "PUT", "/api/2.0/mlflow-artifacts/artifacts/0/evil/MLmodel", {"flavors": {}}),
    ("mlflow", "DELETE", "/api/2.0/mlflow-artifacts/artifacts/0/evil", None),
    ("mlflow", "GET", "/api/2.0/mlflow/experiments/search?max_results=1", None),
    ("mlflow", "GET", "/get-artifact?path=a&run_uuid=0", None),
    ("mlflow", "GET", "/version", None),
    ("mlflow", "POST", "/graphql", {"query": "{ __typename }"}),
    ("dashboard", "GET", "/api/studies", None),
    ("dashboard", "POST", "/api/studies", {"study_name": "theirs", "directions": ["minimize"]}),
    ("dashboard", "DELETE", "/api/studies/1", None),
    ("dashboard", "GET", "/dashboard", None),
]


@pytest.mark.parametrize(("service", "method", "path", "body"), _ATTACKS)
@pytest.mark.parametrize("authorization", ["", "Bearer ", "Bearer wrong", "Basic aHBzZWFyY2g6"])
def test_a_request_without_the_token_is_rejected(
    stack: StackInfo, service: str, method: str, path: str, body: object, authorization: str
) -> None:
    status, _ = send_request(stack, service, method, path, body, Authorization=authorization)
    assert status == 401


def test_paths_in_other_spellings_are_rejected_too(stack: StackInfo) -> None:
    for service in ("mlflow", "dashboard"):
        for path in (
            "//api/studies",
            "/health/../version",
            "/health/x",
            "/HEALTH",
            "/%68ealth/",
            "/?token=",
            "/?token=x",
        ):
            assert send_request(stack, service, "GET", path)[0] in {401, 400}, path


def test_mlflow_reports_its_health_to_everyone(stack: StackInfo) -> None:
    assert send_request(stack, "mlflow", "GET", "/health")[0] == 200


@pytest.mark.parametrize("service", ["mlflow", "dashboard"])
def test_a_link_with_the_token_signs_a_browser_in(stack: StackInfo, token: str, service: str) -> None:
    status, headers = send_request(stack, service, "GET", f"/?token={token}&a=1%202")
    assert (status, headers["location"]) == (303, "/?a=1+2")
    assert headers["clear-site-data"] == '"cache", "storage"'  # of a program that used the address before
    cookie, *attributes = headers["set-cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Strict"} <= set(attributes)
    assert token not in cookie
    assert send_request(stack, service, "GET", "/", Cookie=cookie)[0] in {200, 302}
    assert send_request(stack, service, "GET", "/", Cookie=cookie[:-1])[0] == 401
    assert (
        send_request(stack, service, "GET", "/%09/evil.example/?token=", Cookie=cookie)[1]["location"]
        == "/evil.example/"
    )


@needs_root
@pytest.mark.parametrize("service", ["mlflow", "dashboard"])
def test_another_user_cannot_use_the_cookie_of_a_browser(stack: StackInfo, token: str, service: str) -> None:
    """The browser sends it to all ports of 127.0.0.1, also to the former port of a service."""
    cookie = send_request(stack, service, "GET", f"/?token={token}")[1]["set-cookie"].split("; ")[0]

    def use(**headers: str) -> int:
        return send_request(stack, service, "GET", "/", Cookie=cookie, **headers)[0]

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert act_as_second_user(lambda: [use(), use(X_Forwarded_For=address), use(X_Forwarded_For="a")]) == [401] * 3
    assert use() in {200, 302}


@pytest.mark.parametrize("service", ["mlflow", "dashboard"])
@pytest.mark.parametrize("origin", ["http://localhost:9999", "https://evil.example", "null", "http://127.0.0.1"])
def test_a_page_of_another_origin_is_rejected_and_gets_no_cors_header(
    stack: StackInfo, token: str, service: str, origin: str
) -> None:
    _, headers = send_request(stack, service, "GET", f"/?token={token}")
    cookie = headers["set-cookie"].split("; ")[0]
    path = {"mlflow": "/ajax-api/2.0/mlflow/experiments/search?max_results=1", "dashboard": "/api/studies"}[service]
    for method in ("GET", "POST", "OPTIONS"):
        body = {} if method == "POST" else None
        status, answered = send_request(stack, service, method, path, body, Origin=origin, Cookie=cookie)
        assert status == 403
        assert not [name for name in answered if name.startswith("access-control-")]


@pytest.mark.parametrize("service", ["mlflow", "dashboard"])
def test_other_ports_of_this_machine_may_link_here_but_not_read(stack: StackInfo, token: str, service: str) -> None:
    """All ports of 127.0.0.1 are one site, so the browser sends the cookie with requests of their pages."""
    _, headers = send_request(stack, service, "GET", f"/?token={token}")
    cookie = headers["set-cookie"].split("; ")[0]

    def browse(mode: str, destination: str, method: str = "GET") -> int:
        fetch = {"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": mode, "Sec_Fetch_Dest": destination}
        return send_request(stack, service, method, "/", None, Cookie=cookie, **fetch)[0]

    assert browse("navigate", "document") in {200, 302}
    assert browse("navigate", "iframe") == 403
    assert browse("no-cors", "script") == 403
    assert browse("navigate", "document", "POST") == 403


def test_pages_of_the_dashboard_run_no_foreign_script_and_cannot_be_framed(stack: StackInfo, token: str) -> None:
    _, headers = send_request(stack, "dashboard", "GET", "/dashboard", Authorization=f"Bearer {token}")
    policy = headers["content-security-policy"]
    assert "script-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"


def test_pages_of_mlflow_run_no_foreign_script(stack: StackInfo, token: str) -> None:
    """Tags and notes of a run may contain scripts and images, and the browser sends the cookie for images."""
    header = {"Authorization": f"Bearer {token}"}
    with open_url(f"{stack.tracking_uri}/") as reply:
        policy, page = reply.headers["Content-Security-Policy"], reply.read()
    assert "'unsafe-inline'" not in policy.partition("script-src")[2].partition(";")[0]
    assert "img-src 'self' data: blob:;" in policy
    (own,) = re.findall(rb"<script>(.*?)</script>", page, re.DOTALL)
    assert f"'sha256-{base64.b64encode(hashlib.sha256(own).digest()).decode()}'" in policy
    for path in ("/api/2.0/mlflow/experiments/search?max_results=1", "/graphql"):
        assert send_request(stack, "mlflow", "GET", path, **header)[1]["content-security-policy"] == policy


def test_an_artifact_of_mlflow_is_no_script(stack: StackInfo, token: str) -> None:
    client = mlflow.MlflowClient(stack.tracking_uri)
    run = client.create_run(client.create_experiment("scripts")).info
    header = {"Authorization": f"Bearer {token}"}
    proxy = f"/api/2.0/mlflow-artifacts/artifacts/{run.experiment_id}/{run.run_id}/artifacts"
    for name, kind in (("a.js", None), ("a.mjs", "application/octet-stream"), ("a.png", "image/png")):
        client.log_text(run.run_id, "x", name)
        for path in (f"/get-artifact?path={name}&run_uuid={run.run_id}", f"{proxy}/{name}"):
            got = send_request(stack, "mlflow", "GET", path, **header)[1]
            assert "javascript" not in got["content-type"]
            assert kind is None or got["content-type"] == kind
            assert got["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("service", ["mlflow", "dashboard"])
def test_a_service_worker_is_not_served(stack: StackInfo, token: str, service: str) -> None:
    header = {"Authorization": f"Bearer {token}", "Service_Worker": "script"}
    assert send_request(stack, service, "GET", "/", **header)[0] == 403


@needs_root
def test_another_user_of_this_machine_finds_the_port_and_is_rejected(stack: StackInfo) -> None:
    def attack() -> list[object]:
        found: list[object] = []
        for name in ("web-token", "stack.json"):
            try:
                (stack.home / name).read_text()
                found.append("read")
            except PermissionError:
                found.append("denied")
        sockets = Path("/proc/net/tcp").read_text().splitlines()[1:]
        ports = {int(line.split()[1].split(":")[1], 16) for line in sockets}
        evil = send_request(stack, "mlflow", "PUT", "/api/2.0/mlflow-artifacts/artifacts/0/evil/MLmodel", "evil")
        return [*found, urlsplit(stack.tracking_uri).port in ports, evil[0]]

    assert act_as_second_user(attack) == ["denied", "denied", True, 401]
    assert not (stack.home / "artifacts" / "0" / "evil").exists()


@pytest.fixture
def foreign_port() -> Iterator[int]:
    """Return a port on which a process of another user listens."""
    with listen_as_second_user() as port:
        yield port


@needs_root
def test_the_token_is_not_sent_to_another_users_server_on_the_port_of_a_stopped_service(
    tmp_path: Path, foreign_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPSEARCH_HOME", str(tmp_path))
    (tmp_path / "web-token").write_text("secret")
    (tmp_path / "stack.json").write_text(json.dumps({"mlflow": {"port": foreign_port}, "dashboard": {"port": 1}}))
    assert find_token(f"http://127.0.0.1:{foreign_port}/api") is None


_PROXY = """
import os, sys
import mlflow
from hpsearch.storage.embedded.stack import find_running
from hpsearch.storage.home import prepare_home
from hpsearch.storage.mlflow.health import check_server
stack = find_running(prepare_home())
os.environ |= {"http_proxy": sys.argv[1], "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
check_server(stack.tracking_uri)
for uri in (stack.tracking_uri, sys.argv[1]):
    for auth in ("hpsearch", ""):
        os.environ["MLFLOW_TRACKING_AUTH"] = auth
        try:
            mlflow.MlflowClient(uri).search_experiments()
        except mlflow.exceptions.MlflowException:
            pass
"""


def test_the_token_goes_neither_to_a_proxy_nor_to_another_server(stack: StackInfo, token: str) -> None:
    received: list[str] = []

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            received.append(str(self.headers))
            self.send_error(400)

        do_POST = do_GET  # noqa: N815 as http.server names it

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"}
        environment |= {"HPSEARCH_HOME": str(stack.home), "MLFLOW_TRACKING_URI": stack.tracking_uri}
        run = [sys.executable, "-W", "ignore", "-c", _PROXY, f"http://127.0.0.1:{server.server_port}"]
        subprocess.run(run, env=environment, check=True)
        server.shutdown()
    assert len(received) >= 4
    assert not [headers for headers in received if token in headers]


@needs_root
def test_no_password_goes_to_another_users_server_on_the_port_of_postgres() -> None:
    def ask_for_password(client: socket.socket) -> None:
        client.recv(1000)
        client.sendall(b"R\0\0\0\x08\0\0\0\x03")  # AuthenticationCleartextPassword

    with listen_as_second_user(ask_for_password) as port:
        url = make_database_url("postgres", "secret", "127.0.0.1", port, "postgres", uid=os.geteuid())
        with pytest.raises(psycopg2.OperationalError, match="scram-sha-256"):
            psycopg2.connect(url.replace("+psycopg2", ""))


@needs_root
def test_a_service_is_not_healthy_on_the_port_of_another_user(tmp_path: Path, foreign_port: int) -> None:
    """A health request would contain the token."""
    service = WebService(
        name="x",
        health_path="/",
        command=lambda _: ([], {}),
        record=ServiceRecord(port=foreign_port),
        token=lambda: "secret",
        save_state=lambda: None,
        home=tmp_path,
        log=tmp_path / "x.log",
    )
    assert not is_own_server(foreign_port)
    assert not service.is_healthy()


def test_the_token_is_added_only_for_the_addresses_of_the_stack(stack: StackInfo, token: str) -> None:
    assert add_token(f"{stack.tracking_uri}/#/models/a") == f"{stack.tracking_uri}/?token={token}#/models/a"
    port = urlsplit(stack.tracking_uri).port
    for other in (
        f"http://127.0.0.1:{port}0/",
        f"http://mlflow:{port}/",
        f"https://127.0.0.1:{port}/",
        "http://127.0.0.1:x/",
        f"http://evil.example\\@127.0.0.1:{port}/",  # requests takes evil.example as its host
        f"http://user@127.0.0.1:{port}/",
    ):
        assert add_token(other) == other


@pytest.mark.parametrize("separator", ["|", '"', "`", ";", "\u00a6"])
def test_an_address_behind_one_of_the_stack_gets_no_token(stack: StackInfo, token: str, separator: str) -> None:
    shown = add_tokens(f"{stack.tracking_uri}/{separator}http://evil.example/x")
    assert shown.endswith("://evil.example/x")
    assert token in shown


@pytest.mark.parametrize("prefix", ["http://evil.example/?u=", "https://evil.example/#", "evil.example?", "(", "\x07"])
def test_an_address_in_another_link_gets_no_token(stack: StackInfo, token: str, prefix: str) -> None:
    assert add_tokens(f"{prefix}{stack.tracking_uri}/") == f"{prefix}{stack.tracking_uri}/"
    assert token in add_tokens(f"MLflow: {stack.tracking_uri}/")


@pytest.mark.soak
def test_mlflow_works_without_settings_in_a_program_that_knows_only_the_address(stack: StackInfo) -> None:
    program = "import mlflow, sys; mlflow.set_tracking_uri(sys.argv[1]); print(len(mlflow.search_experiments()))"
    environment = {**os.environ, "HPSEARCH_HOME": str(stack.home)}
    run = [sys.executable, "-W", "ignore", "-c", program, stack.tracking_uri]
    assert int(subprocess.check_output(run, env=environment, text=True)) >= 1


@pytest.mark.soak
def test_mlflow_works_with_the_token_in_its_own_variable(stack: StackInfo, token: str, tmp_path: Path) -> None:
    program = "import mlflow; print(len(mlflow.search_experiments()))"
    variables = {"MLFLOW_TRACKING_URI": stack.tracking_uri, "MLFLOW_TRACKING_TOKEN": token}
    environment = {**os.environ, "HPSEARCH_HOME": str(tmp_path), **variables}
    run = [sys.executable, "-W", "ignore", "-c", program]
    assert int(subprocess.check_output(run, env=environment, text=True)) >= 1


def test_credentials_for_another_server_do_not_lock_the_user_out(
    stack: StackInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "someone")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "elsewhere")
    assert mlflow.MlflowClient(stack.tracking_uri).search_experiments()
    with open_url(f"{stack.dashboard_url}/api/meta") as reply:
        assert reply.status == 200


@pytest.mark.soak
def test_no_auth_needs_no_token_until_auth_is_chosen_again_and_tokens_are_replaced(
    own_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from hpsearch.search.services import DASHBOARD_COMMAND

    stack = embedded.up(own_home, dashboard=DASHBOARD_COMMAND, needs_token=False)
    for url in (f"{stack.tracking_uri}/version", f"{stack.dashboard_url}/api/meta"):
        with urlopen(url, timeout=300) as reply:
            assert reply.status == 200
    assert embedded.find_running(own_home) == stack, "the choice stays"
    assert send_request(stack, "mlflow", "GET", "/version", Origin="http://localhost:9999")[0] == 403

    stack = embedded.up(own_home, dashboard=DASHBOARD_COMMAND, needs_token=True)
    assert send_request(stack, "mlflow", "GET", "/version")[0] == 401
    assert send_request(stack, "dashboard", "GET", "/api/meta")[0] == 401

    # A new token replaces the old one in the way that the documentation describes.
    old = read_token(own_home)
    _, headers = send_request(stack, "mlflow", "GET", f"/?token={old}")
    (own_home / "web-token").unlink()
    embedded.down(own_home)
    stack = embedded.up(own_home, dashboard=DASHBOARD_COMMAND)
    new = read_token(own_home)
    assert new
    assert new != old
    for service, path in (("mlflow", "/version"), ("dashboard", "/api/meta")):
        assert send_request(stack, service, "GET", path, Authorization=f"Bearer {old}")[0] == 401
        assert send_request(stack, service, "GET", path, Cookie=headers["set-cookie"].split("; ")[0])[0] == 401
        assert send_request(stack, service, "GET", path, Authorization=f"Bearer {new}")[0] == 200


def test_the_token_is_in_no_command_line_log_or_study(stack: StackInfo, token: str) -> None:
    command_lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [line for line in command_lines if token.encode() in line]
    assert not [log for log in (stack.home / "logs").rglob("*.log") if token in log.read_text(errors="replace")]
    with make_engine(stack.owner_url, application_name="test").connect() as connection:
        rows = connection.execute(text("SELECT value_json FROM study_user_attributes")).scalars().all()
    assert not [row for row in rows if token in row]


class Recorder(Guard):
    """Guard that rejects each request and records its ports."""

    def check(self, request: Request) -> Reply:
        """Record the ports of the request."""
        ports.append(request.ports)
        return make_reply(HTTPStatus.FORBIDDEN)


ports: list[tuple[int, int] | None] = []


class Connection:
    """Server's end of a connection, at an address."""

    def __init__(self, host: str) -> None:
        self._address = (host, 5000)

    def getsockname(self) -> tuple[str, int]:
        """Return the address."""
        return self._address


@pytest.mark.parametrize(("address", "found"), [("127.0.0.1", (5000, 40000)), ("127.0.0.2", None), ("::1", None)])
def test_the_user_of_a_connection_is_found_by_the_address_of_the_servers_socket(
    address: str, found: tuple[int, int] | None
) -> None:
    """Otherwise a client could choose the port by a header, or use an address at which its port is that of another."""
    ports.clear()
    end = ServerEnd(Connection(address))  # type: ignore[arg-type]
    headers = {"SERVER_PORT": "80", "REMOTE_ADDR": "127.0.0.1", "REMOTE_PORT": "40000", "REQUEST_METHOD": "GET"}
    environ = {**headers, "wsgi.url_scheme": "http", SERVER_END: end}
    guard_wsgi(lambda *_: [], Recorder("token"))(environ, lambda *_: None)

    async def discard(_: dict[str, Any]) -> None:
        pass

    scope = {"type": "http", "method": "GET", "scheme": "http", "path": "/", "query_string": b"", "headers": []}
    scope |= {"client": ("127.0.0.1", 40000), "server": end}
    asyncio.run(guard_asgi(discard, Recorder("token"))(scope, discard, discard))  # type: ignore[arg-type]
    assert ports == [found, found]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell the users of connections")
def test_a_request_whose_client_has_ended_the_connection_is_rejected() -> None:
    """Its ports may be those of a later connection of the user who owns the cookie."""
    while not _reject_request_of_ended_connection():
        pass


def _reject_request_of_ended_connection() -> bool:
    """Return whether the request was rejected; False if another process took the port of the client meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        connection, (_, client_port) = server.accept()
        end, address = ServerEnd(connection), client.getsockname()
        ports = (server.getsockname()[1], client_port)

        def answer(query: str = "", **headers: str) -> Reply | None:
            request = Request("GET", "http", "/", query, headers, ports, end.is_connected)
            return Guard("token").check(request)

        signed_in = answer("token=token")
        assert signed_in is not None
        cookie = dict(signed_in.headers)["Set-Cookie"].split("; ")[0]
        assert answer(cookie=cookie) is None
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # ends it with a reset
        client.close()
        with socket.socket() as later, connection:
            later.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                later.bind(address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return False
                raise
            later.connect(server.getsockname())
            assert find_client_user(*ports) == os.geteuid()
            rejected = answer(cookie=cookie)
            assert rejected is not None
            assert rejected.status == 401
            return True
