"""The MLflow server as an ASGI application that needs a token; ``mlflow server --app-name hpsearch`` runs it."""

from __future__ import annotations

import os

from hpsearch.storage.errors import StorageError
from hpsearch.storage.web.guard import Asgi, Guard, guard_asgi
from hpsearch.storage.web.token import TOKEN_VARIABLE

_ORIGINS = "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS"  # MLflow's own variable


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
    return guard_asgi(app, Guard(token or None, origins))
