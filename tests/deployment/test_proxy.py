"""The proxy's Caddyfile in Caddy, with real services: it rejects requests without the login, and all work with it."""

import base64
import http.client
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import optuna
import pytest
from playwright.sync_api import expect, sync_playwright

from hpsearch.storage.errors import StorageError
from hpsearch.storage.mlflow.credentials import allow_credentials
from hpsearch.storage.mlflow.health import check_server, read_server_version
from tests.deployment.machine import Machine
from tests.e2e.browsing import CHROMIUM, FLAGS, PATIENCE

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.soak,  # a whole deployment for a file that rarely changes
    pytest.mark.skipif(shutil.which("caddy") is None, reason="Caddy is not installed"),
]

Ask = Callable[..., tuple[int, bytes]]

UPLOAD = """
import mlflow
mlflow.set_experiment("from outside")
with mlflow.start_run() as run:
    mlflow.log_metric("loss", 0.5)
    mlflow.log_text("kept" * 300_000, "large.txt")
print(mlflow.artifacts.load_text(f"{run.info.artifact_uri}/large.txt") == "kept" * 300_000)
"""


def older_than(version: tuple[int, int]) -> bool:
    said = subprocess.run(["caddy", "version"], capture_output=True, text=True, check=True).stdout
    return tuple(map(int, re.findall(r"\d+", said)[:2])) < version


def until_certified(machine: Machine, port: int) -> None:
    """Wait until Caddy has signed a certificate; it listens before that."""
    any_authority = ssl.create_default_context()
    any_authority.check_hostname, any_authority.verify_mode = False, ssl.CERT_NONE
    while True:
        try:
            with socket.create_connection(("127.0.0.1", machine.ports[port])) as plain:
                return any_authority.wrap_socket(plain, server_hostname="localhost").close()
        except ssl.SSLError:
            time.sleep(0.1)  # until it is signed


@pytest.fixture
def proxied(machine: Machine) -> Iterator[Machine]:
    """Start the deployment with its proxy."""
    if older_than((2, 8)):
        machine.replaced["basic_auth {"] = "basicauth {"  # its former name
    machine.finish("migrate")
    for name in ("mlflow", "dashboard"):
        machine.until_healthy(name)
    machine.until_listening("proxy", 5443)
    for port in (443, 5443):
        until_certified(machine, port)
    yield machine
    (machine.folder / "proxy.log").write_text(machine.log("proxy")[-20_000:])


def test_services_require_the_login_and_work_behind_the_proxy(
    proxied: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = proxied.folder / "data" / "caddy" / "pki" / "authorities" / "local" / "root.crt"
    trusting = ssl.create_default_context(cafile=str(authority))
    password = proxied.secrets["HPSEARCH_LOGIN_PASSWORD"]
    login = base64.b64encode(f"hpsearch:{password}".encode()).decode()
    dashboard, mlflow = (proxied.ports[port] for port in (443, 5443))

    def ask(port: int, path: str, method: str = "GET", body: str | None = None, **headers: str) -> tuple[int, str, str]:
        connection = http.client.HTTPSConnection("localhost", port, context=trusting, timeout=300)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, {"Content-Type": "application/json", **named})
        response = connection.getresponse()
        return response.status, response.headers.get("Location", ""), response.read().decode(errors="replace")

    wrong = base64.b64encode(b"hpsearch:wrong").decode()
    for port, path in ((dashboard, "/dashboard"), (dashboard, "/api/studies"), (mlflow, "/"), (mlflow, "/health")):
        assert ask(port, path)[0] == 401, (port, path)
        assert ask(port, path, Authorization=f"Basic {wrong}")[0] == 401
        assert ask(port, path, Authorization=f"Basic {login}")[0] == 200

    basic = {"Authorization": f"Basic {login}"}
    assert ask(dashboard, "/", **basic)[:2] == (302, f"https://localhost:{dashboard}/dashboard"), "over TLS, as before"
    found = ask(mlflow, "/api/2.0/mlflow/experiments/get?experiment_id=0", **basic)
    assert json.loads(found[2])["experiment"]["name"] == "Default"
    made = '{"name": "%s"}'
    there = {**basic, "Origin": proxied.local("https://localhost:5443")}
    assert ask(mlflow, "/ajax-api/2.0/mlflow/experiments/create", "POST", made % "by its own page", **there)[0] == 200
    for site in ("cross-site", "same-site"):
        foreign = {**basic, "Sec_Fetch_Site": site}
        assert ask(mlflow, "/api/2.0/mlflow/experiments/create", "POST", made % site, **foreign)[0] == 403
    foreign = {**basic, "Origin": "https://evil.example"}
    assert ask(mlflow, "/api/2.0/mlflow/experiments/create", "POST", made % "evil", **foreign)[0] == 403
    assert ask(dashboard, "/api/studies", "POST", "{}", **basic)[0] == 403, "it is read-only"

    uri = f"https://localhost:{mlflow}"
    monkeypatch.setenv("MLFLOW_TRACKING_SERVER_CERT_PATH", str(authority))
    with pytest.raises(StorageError, match="answers 401 Unauthorized; set MLFLOW_TRACKING_TOKEN"):
        check_server(uri)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "hpsearch")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)
    allow_credentials(uri)
    check_server(uri)
    assert read_server_version(uri)
    environment = {**os.environ, "MLFLOW_TRACKING_URI": uri}
    client = [sys.executable, "-c", UPLOAD]
    done = subprocess.run(client, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["True"], done.stderr
    assert [path.stat().st_size for path in (proxied.folder / "artifacts").rglob("large.txt")] == [1_200_000]

    assert password not in proxied.log("proxy")
    assert login not in proxied.log("proxy")
    assert proxied.secrets["HPSEARCH_WEB_TOKEN"] not in proxied.log("proxy")
    if CHROMIUM is not None:
        address = f"127.0.0.1:{proxied.ports[5432]}/optuna"
        worker = f"postgresql+psycopg2://hpsearch_worker:{proxied.secrets['HPSEARCH_WORKER_PASSWORD']}@{address}"
        optuna.create_study(study_name="a study to see", storage=worker)
        look(dashboard, mlflow, password)


def look(dashboard: int, mlflow: int, password: str) -> None:
    """The pages in a browser, without the login and with it."""
    folder = os.environ.get("SCREENSHOTS")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for login in ({}, {"http_credentials": {"username": "hpsearch", "password": password}}):
            context = browser.new_context(ignore_https_errors=True, viewport={"width": 1300, "height": 800}, **login)
            page = context.new_page()
            page.set_default_timeout(PATIENCE)
            for name, port, text in (("dashboard", dashboard, "a study to see"), ("mlflow", mlflow, "from outside")):
                if not login:
                    assert page.request.get(f"https://localhost:{port}/").status == 401
                    continue
                page.goto(f"https://localhost:{port}/")
                if name == "mlflow":
                    page.goto(f"https://localhost:{port}/#/experiments")
                expect(page.get_by_text(text).first).to_be_visible(timeout=PATIENCE)
                if folder:
                    page.screenshot(path=Path(folder) / f"proxy-{name}.png")
            context.close()
        browser.close()
