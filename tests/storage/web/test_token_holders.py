"""Limits of a holder of the token, such as a worker: no programs and no files of the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import mlflow
import psutil
import pytest
from mlflow.exceptions import MlflowException
from sqlalchemy import text
from sqlalchemy.engine import make_url

from hpsearch.storage.database.connect import make_engine
from hpsearch.storage.embedded.stack import StackInfo
from hpsearch.storage.embedded.state import load_state
from hpsearch.storage.mlflow.server import MlflowGuard
from hpsearch.storage.web.guard import guard_asgi
from tests.storage.web.support import send_request

# MLflow uses only the path of a `file:` URL: the part between the scheme and the question mark.
_HIDING_URLS = (f"file:evil.py%3F/{'0' * 32}/artifacts/x", f"file:evil.py%253B/{'0' * 32}/artifacts/x")


@pytest.mark.parametrize(
    "path", ["evil.py", "0/evil.py", f"{'0' * 32}/evil.py", f"models/{'0' * 32}/artifacts/", *_HIDING_URLS]
)
@pytest.mark.parametrize(("method", "call"), [("PUT", "artifacts"), ("POST", "mpu/create")])
def test_a_holder_of_the_token_uploads_only_to_folders_of_artifacts(
    stack: StackInfo, token: str, method: str, call: str, path: str
) -> None:
    """Otherwise a command of the owner could import an uploaded file as an objective."""
    url, header = f"/api/2.0/mlflow-artifacts/{call}/{path}", {"Authorization": f"Bearer {token}"}
    status, _ = send_request(stack, "mlflow", method, url, "print()", **header)
    assert status == 403
    assert not list((stack.home / "artifacts").rglob("evil.py"))


@pytest.mark.parametrize("path", [".", "%2e", "%252e", "1/.", "", "1", f"file:1%3F/{'0' * 32}/artifacts"])
def test_a_holder_of_the_token_does_not_delete_the_artifacts_of_all_runs_at_once(
    stack: StackInfo, token: str, path: str
) -> None:
    kept = stack.home / "artifacts" / "1" / "kept"
    kept.parent.mkdir(exist_ok=True)
    kept.touch()
    url = f"/api/2.0/mlflow-artifacts/artifacts/{path}"
    assert send_request(stack, "mlflow", "DELETE", url, Authorization=f"Bearer {token}")[0] == 403
    assert kept.exists()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", "/ajax-api/3.0/mlflow/assistant/config"),
        ("POST", "//ajax-api/3.0//mlflow/gateway/endpoints/create"),
        ("POST", "/gateway/mlflow/v1/chat/completions"),
        ("POST", "/ajax-api/3.0/jobs/"),
        ("GET", "/ajax-api/3.0/mlflow/jobs/x"),
        ("GET", "/api/3.0/mlflow/workspaces"),
        ("POST", "/api/2.0/mlflow/webhooks"),
    ],
)
def test_a_holder_of_the_token_cannot_run_programs_on_the_server(
    stack: StackInfo, token: str, method: str, path: str
) -> None:
    """MLflow's assistant runs commands in a shell; other features send requests to any address."""
    assert send_request(stack, "mlflow", method, path, {}, Authorization=f"Bearer {token}")[0] == 403


def test_the_pages_of_mlflow_find_no_gateway(stack: StackInfo, token: str) -> None:
    """With another reply to this request, MLflow's table of runs shows an error."""
    url = f"{stack.tracking_uri}/ajax-api/2.0/mlflow/gateway-proxy?gateway_path=api/2.0/endpoints/"
    with urlopen(Request(url, headers={"Authorization": f"Bearer {token}"}), timeout=300) as reply:
        assert json.load(reply) == {"endpoints": []}
    header = {"Authorization": f"Bearer {token}"}
    assert send_request(stack, "mlflow", "POST", "/ajax-api/2.0/mlflow/gateway-proxy", {}, **header)[0] == 403


@pytest.mark.parametrize(
    ("path", "root", "status"),
    [
        ("/x/y/ajax-api/3.0/mlflow/assistant/config", "", 403),
        ("//x//y//gateway/mlflow/v1/chat/completions", "", 403),
        ("/ajax-api/3.0/mlflow/assistant/config", "", 403),
        ("/root/x/y/api/2.0/mlflow/webhooks", "/root", 403),
        ("/root/api/2.0/mlflow/webhooks", "/root", 403),
        ("/x/y/ajax-api/2.0/mlflow/experiments/search", "", 200),
        ("/ajax-api/2.0/mlflow-artifacts/artifacts/1/gateway/file", "", 200),
    ],
)
def test_disabled_features_have_no_other_paths(
    path: str, root: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow has its pages also below MLFLOW_STATIC_PREFIX, and uvicorn adds its root path to all paths."""
    monkeypatch.setenv("_MLFLOW_STATIC_PREFIX", "/x/y")

    async def answer(_scope: object, _receive: object, send: Callable[..., Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def record(message: dict[str, Any]) -> None:
        messages.append(message)

    messages: list[dict[str, Any]] = []
    scope = {"type": "http", "method": "GET", "scheme": "http", "path": path, "root_path": root}
    app: Any = guard_asgi(answer, MlflowGuard(None))
    asyncio.run(app({**scope, "headers": [], "query_string": b""}, None, record))
    assert messages[0]["status"] == status


@pytest.mark.parametrize(("host", "status"), [("10.evil.example", 403), ("localhost:9", 200), ("[::1]:9", 200)])
def test_mlflow_of_this_machine_accepts_only_its_names(stack: StackInfo, token: str, host: str, status: int) -> None:
    """MLflow's default accepts all names that begin like private addresses, to which a web page can be bound."""
    header = {"Authorization": f"Bearer {token}", "Host": host}
    path = "/api/2.0/mlflow/experiments/search?max_results=1"
    assert send_request(stack, "mlflow", "GET", path, **header)[0] == status


def test_temporary_files_of_mlflow_are_in_the_home(stack: StackInfo) -> None:
    """In /tmp, another user could create links with the names of its lock files."""
    port = urlsplit(stack.tracking_uri).port
    (pid,) = {c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port}
    assert psutil.Process(pid).environ()["TMPDIR"] == str(stack.home / "mlflow-tmp")


def test_the_page_of_mlflow_hides_the_disabled_assistant(stack: StackInfo, token: str) -> None:
    request = Request(stack.tracking_uri, headers={"Authorization": f"Bearer {token}"})
    with urlopen(request) as reply:
        page = reply.read()
    assert b"[data-assistant-ui] { display: none" in page
    assert page.endswith(b"</html>")


def test_a_holder_of_the_token_cannot_choose_a_folder_for_artifacts(
    stack: StackInfo, token: str, tmp_path: Path
) -> None:
    client = mlflow.MlflowClient(stack.tracking_uri)
    for location in (
        f"file://{tmp_path}",
        str(tmp_path),
        "relative",
        "s3://bucket/x",
        f"{stack.home}/artifacts/x",
        f"{stack.home}/artifacts/../x",
        f"{stack.home}/artifacts/%2e%2e/x",
        "mlflow-artifacts:/%2e%2e/x",
        "mlflow-artifacts:/../../x",
        "mlflow-artifacts:////127.0.0.1:9/x",
    ):
        with pytest.raises(MlflowException, match="'artifact_location' is not a location of this server; omit it"):
            client.create_experiment("theirs", artifact_location=location)
    client.create_registered_model("theirs")
    with pytest.raises(MlflowException, match="'source' is not a location of this server"):
        client.create_model_version("theirs", "s3://bucket/x")
    run = client.create_run(client.create_experiment("earlier")).info
    found = load_state(stack.home)
    assert found is not None
    url = make_url(stack.owner_url).set(username="mlflow", password=found.mlflow_password, database="mlflow")
    engine = make_engine(url.render_as_string(hide_password=False), application_name="test")
    elsewhere = f"{tmp_path}/{run.run_id}/artifacts"
    for location in (elsewhere, "models://p@databricks/x/1", "runs:////p@databricks/x", "Models://p@databricks/x/1"):
        with engine.begin() as connection:  # as an earlier version allowed
            change = text("UPDATE runs SET artifact_uri = :location WHERE run_uuid = :run")
            connection.execute(change, {"location": location, "run": run.run_id})
        with pytest.raises(HTTPError) as rejected:
            upload_artifact(stack, token, run.run_id)
        assert rejected.value.code == 400
        assert b"the artifacts are not at a location of this server" in rejected.value.read(), location
    assert not list(tmp_path.rglob("*"))


def upload_artifact(stack: StackInfo, token: str, run_id: str) -> None:
    path = f"/ajax-api/2.0/mlflow/upload-artifact?run_uuid={run_id}&path=a.txt"
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    with urlopen(Request(stack.tracking_uri + path, data=b'"text"', headers=headers)):
        pass
