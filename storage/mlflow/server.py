"""The MLflow server as an ASGI application that needs a token; ``mlflow server --app-name hpsearch`` runs it.

A client with the token can read and change the data of MLflow, but cannot run programs or reach other files of the
server.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import os
import re
import socket
import sys
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import sqlalchemy as sa

from hpsearch.storage.database.libpq import check_server_user_of
from hpsearch.storage.errors import StorageError
from hpsearch.storage.hdfs_library import HDFS_SCHEMES, load_hdfs_library
from hpsearch.storage.mlflow.locations import ARTIFACT_PATH, OWNER_PATH
from hpsearch.storage.sockets import listen_exclusively
from hpsearch.storage.web.guard import Asgi, Guard, Reply, Request, ServerEnd, guard_asgi, make_reply
from hpsearch.storage.web.token import TOKEN_VARIABLE

_ORIGINS = "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS"  # MLflow's own variables
_DESTINATION = "_MLFLOW_SERVER_ARTIFACT_DESTINATION"
_PREFIX = "_MLFLOW_STATIC_PREFIX"  # the value of MLFLOW_STATIC_PREFIX, below which MLflow also has its pages
_PROXY = "/mlflow-artifacts/"
# Features that run programs on the server or send requests to addresses that the client chooses.
_DISABLED = (
    r"/+(gateway|(ajax-)?api/+\d\.\d/+(jobs|mlflow/+(assistant|demo|gateway|gateway-proxy|genai|issues|jobs|mcp-servers"
    r"|prompt-optimization|scorers?|webhooks|workspaces)))(/|$)"
)
_REFERENCES = ("mlflow-artifacts", "models", "runs")  # schemes of locations below that of the server
_DISABLED_TEXT = b"hpsearch disables this feature of MLflow.\n"
_NO_ENDPOINTS = b'{"endpoints": []}'  # MLflow's own reply to its pages if no gateway is configured
# The assistant's panel would open at the first visit, and cover a quarter of the page.
_HIDING_SCRIPT = b'localStorage.setItem("mlflow.assistant.fab.autoOpenedOnFirstLoad_v1", "true")'
_HIDE_ASSISTANT = (
    b"<script>" + _HIDING_SCRIPT + b"</script><style>[data-assistant-ui] { display: none !important }</style></head>"
)
_HASHES = (
    base64.b64encode(hashlib.sha256(_HIDING_SCRIPT).digest()).decode(),
    # The script of hpsearch's report, without and with a Pareto front, so that the view of artifacts draws its figures.
    "HrpfMn/nTUqg3P07RIaMd0UseK0rOp82+Q8Zr/+V3dI=",
    "e2eplmLFDbf+Lg5moFdRc0xN9jVDbtiClfkmw5ulR30=",
)
# MLflow's pages have inline styles, plots with images from data URLs, and views of artifacts from blob URLs.
_SCRIPTS = " ".join(f"'sha256-{each}'" for each in _HASHES)
PAGE_POLICY = (
    f"default-src 'self'; script-src 'self' {_SCRIPTS}; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; worker-src 'self' blob:; "
    "frame-src 'self' blob:; object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'self'"
)
_UPLOAD_TEXT = b"Upload to the artifacts of a run, model or trace: EXPERIMENT/RUN/artifacts/FILE.\n"
_DELETION_TEXT = b"Delete the artifacts of a run, model or trace: EXPERIMENT/RUN/artifacts.\n"


class MlflowGuard(Guard):
    """Guard that also rejects the disabled features, and changes outside the artifacts of runs, models and traces.

    Commands import no objective file from a folder of artifacts, which they recognize by its path.
    """

    def check(self, request: Request) -> Reply | None:
        """Return the reply to a request that is not accepted; None if MLflow may answer."""
        if (reply := super().check(request)) is not None:
            return reply
        if _is_disabled(request.path.removeprefix(request.root)):
            if request.method == "GET" and request.path.endswith("/gateway-proxy"):
                return make_reply(HTTPStatus.OK, _NO_ENDPOINTS)
            return make_reply(HTTPStatus.FORBIDDEN, _DISABLED_TEXT)
        _, proxy, route = request.path.partition(_PROXY)
        if not proxy or request.method in {"GET", "HEAD"}:
            return None
        path = _find_artifact_path(route)
        if request.method == "DELETE":
            is_accepted, text = OWNER_PATH.search(path), _DELETION_TEXT  # "." is the folder of all artifacts
        else:
            is_accepted, text = ARTIFACT_PATH.search(path), _UPLOAD_TEXT
        return None if is_accepted else make_reply(HTTPStatus.FORBIDDEN, text)


def _find_artifact_path(route: str) -> str:
    """Return the path that MLflow uses for a route of its proxy for artifacts; an empty text if MLflow rejects it.

    MLflow decodes paths repeatedly, and reads only the path of a `file:` URL.
    """
    from mlflow.exceptions import MlflowException
    from mlflow.utils.uri import validate_path_is_safe

    path = re.sub(r"\A(artifacts|mpu/\w+)/", "", route)
    try:
        return str(validate_path_is_safe(path))
    except (MlflowException, ValueError):
        return ""


def _is_disabled(path: str) -> bool:
    """Return whether the path of a request belongs to a disabled feature, with or without MLflow's prefix of paths."""
    prefix = "".join(f"/+{re.escape(part)}" for part in os.environ.get(_PREFIX, "").split("/") if part)
    return re.match(f"({prefix})?{_DISABLED}", path) is not None


def _check_database_user(_dialect: Any, _record: Any, _arguments: Any, parameters: Any) -> None:
    """Check the user of the embedded Postgres before each connection of MLflow."""
    check_server_user_of(parameters)


def _adapt_uvicorn() -> None:
    """Let uvicorn, which loads this application before it listens, use a port that no other user shares.

    The scopes of its requests get a `ServerEnd`.
    """
    from uvicorn.server import Server

    startup = Server.startup

    async def start(server: Server, sockets: list[socket.socket] | None = None) -> None:
        config, log = server.config, logging.getLogger("uvicorn.error")
        try:
            listeners = sockets or listen_exclusively(config.host, config.port)
        except OSError as error:
            log.error("cannot listen on %s:%d: %s", config.host, config.port, error)
            sys.exit(1)
        config.http_protocol_class = _make_protocol_class(config.http_protocol_class)
        await startup(server, listeners)
        log.info("MLflow listens on http://%s:%d", config.host, config.port)

    Server.startup = start  # type: ignore[method-assign, assignment]  # it has no setting for this


def _make_protocol_class(base: Any) -> Any:
    class Protocol(base):  # type: ignore[misc]  # uvicorn chooses the base at its start
        """HTTP protocol of uvicorn that adds a `ServerEnd` to the scopes."""

        def connection_made(self, transport: asyncio.Transport) -> None:
            """Set the `ServerEnd` of the connection."""
            super().connection_made(transport)
            self.server = ServerEnd(transport.get_extra_info("socket"))

    return Protocol


def create_app() -> Asgi:
    """Return MLflow's application, guarded by the token in HPSEARCH_WEB_TOKEN.

    An empty token, which `--no-auth` sets, accepts requests without a token.

    Raises:
        StorageError: the variable is not set.
    """
    if (token := os.environ.get(TOKEN_VARIABLE)) is None:
        raise StorageError(f"{TOKEN_VARIABLE} is not set: start MLflow with hpsearch serve mlflow")
    sa.event.listen(sa.Engine, "do_connect", _check_database_user)
    _adapt_uvicorn()
    from mlflow.server import app as pages  # here, as the parent process of the server imports this module too
    from mlflow.server.fastapi_app import app

    pages.after_request(_hide_assistant)
    restrict_locations(os.environ.get(_DESTINATION, ""))
    origins = [origin.strip() for origin in os.environ.get(_ORIGINS, "").split(",") if origin.strip()]
    return guard_asgi(_add_policy(app), MlflowGuard(token or None, origins))


def _add_policy(app: Asgi) -> Asgi:
    """Wrap MLflow's application so that browsers run only its own scripts: none in tags, notes and artifacts."""

    async def answer(scope: dict[str, Any], receive: Any, send: Any) -> None:
        async def send_with_policy(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = dict(message["headers"])
                headers[b"content-security-policy"] = PAGE_POLICY.encode()
                is_artifact = headers.get(b"content-disposition", b"").startswith(b"attachment")
                if is_artifact and b"script" in headers.get(b"content-type", b""):
                    headers[b"content-type"] = b"application/octet-stream"
                message["headers"] = list(headers.items())
            await send(message)

        await app(scope, receive, send_with_policy)

    return answer


def _hide_assistant(response: Any) -> Any:
    """Hide the button of MLflow's assistant in the page of the user interface."""
    if response.mimetype == "text/html" and response.status_code == HTTPStatus.OK:
        response.direct_passthrough = False  # of a file
        response.set_data(response.get_data().replace(b"</head>", _HIDE_ASSISTANT))
    return response


def restrict_locations(destination: str) -> None:
    """Restrict the MLflow server of this process to its own artifact locations.

    Otherwise a client could create an experiment or a model version whose artifacts are in any folder or bucket, and
    read and write there with the permissions of the server.

    Args:
        destination: folder or URL of the artifacts that clients access through the server.
    """
    from mlflow.exceptions import MlflowException
    from mlflow.server import handlers
    from mlflow.store.artifact import artifact_repository_registry as registry

    check_scheme = handlers._validate_artifact_uri_scheme

    root = f"{destination.rstrip('/')}/"
    has_remote_artifacts = "://" in destination and not destination.startswith("file:")
    if destination.startswith(HDFS_SCHEMES):
        load_hdfs_library()

    def is_own(uri: str) -> bool:
        try:
            parts = urlsplit(uri)  # as MLflow parses it
        except ValueError:
            return False
        if parts.scheme in _REFERENCES:  # with a host, MLflow would use the server's login for Databricks
            has_host = parts.netloc or parts.path.startswith("//")
            return not has_host and "%" not in uri and ".." not in parts.path.split("/")
        below = uri.removeprefix(root)
        # MLflow decodes the paths of local folders.
        return uri == destination or (below != uri and ".." not in below and "%" not in below)

    def check_own(uri: str, field_name: str) -> None:
        check_scheme(uri, field_name)
        # A client would open a local folder on its own machine.
        is_reference = uri.partition(":")[0] in _REFERENCES
        if not is_own(uri) or not (is_reference or has_remote_artifacts):
            raise MlflowException.invalid_parameter_value(f"'{field_name}' is not a location of this server; omit it")

    handlers._validate_artifact_uri_scheme = check_own
    for scheme, repository in list(registry.get_registered_artifact_repositories().items()):

        def create(uri: str, *arguments: Any, repository: Any = repository, **options: Any) -> Any:
            if not is_own(uri):
                raise MlflowException.invalid_parameter_value("the artifacts are not at a location of this server")
            return repository(uri, *arguments, **options)

        registry._artifact_repository_registry.register(scheme, create)
