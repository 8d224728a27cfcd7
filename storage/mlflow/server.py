"""The MLflow server as an ASGI application that needs a token; ``mlflow server --app-name hpsearch`` runs it.

The token gives access to the data of MLflow, not to the account or the files of the user who runs the server.
"""

from __future__ import annotations

import os
import re
from http import HTTPStatus
from typing import Any

import sqlalchemy as sa

from hpsearch.storage.database.libpq import check_parameters
from hpsearch.storage.errors import StorageError
from hpsearch.storage.mlflow.locations import ARTIFACT_PATH
from hpsearch.storage.web.guard import Asgi, Guard, Reply, Request, guard_asgi, make_reply
from hpsearch.storage.web.token import TOKEN_VARIABLE

_ORIGINS = "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS"  # MLflow's own variables
_DESTINATION = "_MLFLOW_SERVER_ARTIFACT_DESTINATION"
_PROXY = "/mlflow-artifacts/"
# Features that run programs on the server or send requests to addresses of the client.
_DISABLED = re.compile(
    r"/+(gateway|(ajax-)?api/+\d\.\d/+(jobs|mlflow/+(assistant|demo|gateway|gateway-proxy|genai|issues|mcp-servers"
    r"|prompt-optimization|scorers?|webhooks)))(/|$)"
)
_DISABLED_TEXT = b"hpsearch disables this feature of MLflow.\n"
# The assistant's panel would open at the first visit, and cover a quarter of the page.
_HIDE_ASSISTANT = b"""<script>localStorage.setItem("mlflow.assistant.fab.autoOpenedOnFirstLoad_v1", "true")</script>
<style>[data-assistant-ui] { display: none !important }</style></head>"""
_UPLOAD_TEXT = b"Upload to the artifacts of a run, model or trace: EXPERIMENT/RUN/artifacts/FILE.\n"


class _MlflowGuard(Guard):
    """Guard that also rejects uploads to other folders than those that MLflow uses for artifacts.

    Commands import no objective file from a folder of artifacts, which they recognize by its path.
    """

    def check(self, request: Request) -> Reply | None:
        if (reply := super().check(request)) is not None:
            return reply
        if _DISABLED.match(request.path):
            return make_reply(HTTPStatus.FORBIDDEN, _DISABLED_TEXT)
        is_upload = _PROXY in request.path and request.method not in {"GET", "HEAD", "DELETE"}
        if is_upload and not ARTIFACT_PATH.search(request.path.partition(_PROXY)[2]):
            return make_reply(HTTPStatus.FORBIDDEN, _UPLOAD_TEXT)
        return None


def _check_database_user(_dialect: Any, _record: Any, _arguments: Any, parameters: Any) -> None:
    """Check the user of the embedded Postgres before each connection of MLflow."""
    check_parameters(parameters)


def create_app() -> Asgi:
    """Return MLflow's application, guarded by the token in HPSEARCH_WEB_TOKEN.

    An empty token, which `--no-auth` sets, accepts requests without a token.

    Raises:
        StorageError: the variable is not set.
    """
    if (token := os.environ.get(TOKEN_VARIABLE)) is None:
        raise StorageError(f"{TOKEN_VARIABLE} is not set: start MLflow with hpsearch serve mlflow")
    sa.event.listen(sa.Engine, "do_connect", _check_database_user)
    from mlflow.server import app as pages  # here, as the parent process of the server imports this module too
    from mlflow.server.fastapi_app import app

    pages.after_request(_hide_assistant)
    reject_local_locations(os.environ.get(_DESTINATION))
    origins = [origin.strip() for origin in os.environ.get(_ORIGINS, "").split(",") if origin.strip()]
    return guard_asgi(app, _MlflowGuard(token or None, origins))


def _hide_assistant(response: Any) -> Any:
    """Hide the button of MLflow's assistant in the page of the user interface."""
    if response.mimetype == "text/html" and response.status_code == HTTPStatus.OK:
        response.direct_passthrough = False  # of a file
        response.set_data(response.get_data().replace(b"</head>", _HIDE_ASSISTANT))
    return response


def reject_local_locations(destination: str | None) -> None:
    """Let the MLflow server of this process reject folders of this machine as artifact locations.

    Otherwise a client could create an experiment whose artifacts are in any folder, and read and write files there.

    Args:
        destination: folder or URL of the artifacts that clients access through the server; it stays usable.
    """
    from mlflow.exceptions import MlflowException
    from mlflow.server import handlers
    from mlflow.store.artifact import artifact_repository_registry as registry
    from mlflow.utils.uri import is_local_uri

    check_scheme = handlers._validate_artifact_uri_scheme

    def check_not_local(uri: str, field_name: str) -> None:
        check_scheme(uri, field_name)
        if is_local_uri(uri):
            raise MlflowException.invalid_parameter_value(f"'{field_name}' is a folder of the server; omit it")

    handlers._validate_artifact_uri_scheme = check_not_local
    for scheme in ("", "file"):
        create_local: Any = registry.get_registered_artifact_repositories()[scheme]

        def create(artifact_uri: str, *arguments: Any, create_local: Any = create_local, **options: Any) -> Any:
            if artifact_uri != destination:
                raise MlflowException.invalid_parameter_value("the artifacts are in a folder of the server")
            return create_local(artifact_uri, *arguments, **options)

        registry._artifact_repository_registry.register(scheme, create)
