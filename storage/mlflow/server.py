"""The MLflow server as an ASGI application that needs a token; ``mlflow server --app-name hpsearch`` runs it."""

from __future__ import annotations

import os
from http import HTTPStatus

from hpsearch.storage.errors import StorageError
from hpsearch.storage.mlflow.locations import ARTIFACT_PATH
from hpsearch.storage.web.guard import Asgi, Guard, Reply, Request, guard_asgi, make_reply
from hpsearch.storage.web.token import TOKEN_VARIABLE

_ORIGINS = "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS"  # MLflow's own variable

_PROXY = "/mlflow-artifacts/"
_UPLOAD_TEXT = b"Upload to the artifacts of a run, model or trace: EXPERIMENT/RUN/artifacts/FILE.\n"


class _MlflowGuard(Guard):
    """Guard that also rejects uploads to other folders than those that MLflow uses for artifacts.

    Commands import no objective file from a folder of artifacts, which they recognize by its path.
    """

    def check(self, request: Request) -> Reply | None:
        is_upload = _PROXY in request.path and request.method not in {"GET", "HEAD", "DELETE"}
        if is_upload and not ARTIFACT_PATH.search(request.path.partition(_PROXY)[2]):
            return super().check(request) or make_reply(HTTPStatus.FORBIDDEN, _UPLOAD_TEXT)
        return super().check(request)


def create_app() -> Asgi:
    """Return MLflow's application, guarded by the token in HPSEARCH_WEB_TOKEN.

    An empty token, which `--no-auth` sets, accepts requests without a token.

    Raises:
        StorageError: the variable is not set.
    """
    if (token := os.environ.get(TOKEN_VARIABLE)) is None:
        raise StorageError(f"{TOKEN_VARIABLE} is not set: start MLflow with hpsearch serve mlflow")
    from mlflow.server.fastapi_app import app  # here, as the parent process of the server imports this module too

    origins = [origin.strip() for origin in os.environ.get(_ORIGINS, "").split(",") if origin.strip()]
    return guard_asgi(app, _MlflowGuard(token or None, origins))
