"""Send the token of the embedded services with the requests of MLflow's client; MLflow loads both classes by plugin.

`TokenAuth` works for all clients of this process, as it sees the address of each request. `TokenHeader` works without
any setting, for programs that call only MLflow, if MLflow's tracking URI is the address of an embedded server.
"""

from __future__ import annotations

import os
from typing import Any

from mlflow.tracking.request_auth.abstract_request_auth_provider import RequestAuthProvider
from mlflow.tracking.request_header.abstract_request_header_provider import RequestHeaderProvider

from hpsearch.storage.web.token import AUTH_NAME, find_token


def authorize(request: Any) -> Any:
    """Add the token to a prepared request if its URL is that of an embedded service."""
    if (token := find_token(request.url)) is not None:
        request.headers["Authorization"] = f"Bearer {token}"
    return request


class TokenAuth(RequestAuthProvider):  # type: ignore[misc]
    """Provider for clients that have MLFLOW_TRACKING_AUTH=hpsearch."""

    def get_name(self) -> str:
        """Return the value of MLFLOW_TRACKING_AUTH that selects this provider."""
        return AUTH_NAME

    def get_auth(self) -> Any:
        """Return the function that adds the token to a request."""
        return authorize


class TokenHeader(RequestHeaderProvider):  # type: ignore[misc]
    """Provider for clients without settings."""

    def in_context(self) -> bool:
        """Return whether the tracking URI is the address of an embedded server, and `TokenAuth` is not in use."""
        return os.environ.get("MLFLOW_TRACKING_AUTH") != AUTH_NAME and bool(self.request_headers())

    def request_headers(self) -> dict[str, str]:
        """Return the header with the token."""
        import mlflow

        token = find_token(mlflow.get_tracking_uri())
        return {} if token is None else {"Authorization": f"Bearer {token}"}
