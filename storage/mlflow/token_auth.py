"""Send the token of the embedded services with the requests of MLflow's client; MLflow loads both classes by plugin.

`TokenAuth` needs MLFLOW_TRACKING_AUTH, which hpsearch sets. `TokenHeader` works without any setting, for programs that
call only MLflow. Requests to embedded services are sent only to processes of this user.
"""

from __future__ import annotations

import inspect
import logging
import os
import socket
from typing import Any

from mlflow.tracking.request_auth.abstract_request_auth_provider import RequestAuthProvider
from mlflow.tracking.request_header.abstract_request_header_provider import RequestHeaderProvider
from urllib3.connection import HTTPConnection
from urllib3.connectionpool import HTTPConnectionPool
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError
from urllib3.response import HTTPResponse
from urllib3.util.wait import wait_for_read

from hpsearch.storage.sockets import LOOPBACK
from hpsearch.storage.web.connections import connect_to_own_server
from hpsearch.storage.web.token import AUTH_NAME, find_request_token, is_embedded, is_embedded_port

log = logging.getLogger(__name__)

_QUIET_SECONDS = 5.0


class _CheckedConnection(HTTPConnection):
    """HTTP connection that is used for an embedded service only if it leads to a process of this user.

    It logs a warning while it waits for a server.
    """

    is_waiting = False  # class attribute: a frozen server causes one warning, not one per request

    def _new_conn(self) -> socket.socket:
        if not self._is_embedded():
            return super()._new_conn()
        limit = self.timeout if isinstance(self.timeout, int | float) else None
        try:
            return connect_to_own_server(self.port or 0, limit)
        except TimeoutError as error:
            raise ConnectTimeoutError(self, f"no connection within {limit} s") from error
        except OSError as error:
            raise NewConnectionError(self, str(error.strerror)) from error

    def _is_embedded(self) -> bool:
        return self.host == LOOPBACK and is_embedded_port(self.port or 0)

    def getresponse(self) -> HTTPResponse:  # type: ignore[override]  # as urllib3 declares it
        """Return the response of the server."""
        limit = None if self.sock is None else self.sock.gettimeout()
        if limit is not None and limit > _QUIET_SECONDS and self._is_embedded():
            is_answering = wait_for_read(self.sock, timeout=_QUIET_SECONDS)
            if not is_answering:
                if not _CheckedConnection.is_waiting:
                    log.warning("waiting for the service on port %s, which does not answer", self.port)
                self.sock.settimeout(limit - _QUIET_SECONDS)
            _CheckedConnection.is_waiting = not is_answering
        return super().getresponse()


# All sessions of MLflow's client open their connections here. It has no setting for another class.
HTTPConnectionPool.ConnectionCls = _CheckedConnection


def authorize(request: Any) -> Any:
    """Replace the credentials of a prepared request by the token if its URL is that of an embedded service."""
    if is_embedded(request.url):
        request.headers.pop("Authorization", None)  # the environment has them for another server
    if (token := _find_token(request.url)) is not None:
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
        """Return whether the request is for an embedded server, and `TokenAuth` is not in use."""
        return os.environ.get("MLFLOW_TRACKING_AUTH") != AUTH_NAME and bool(self.request_headers())

    def request_headers(self) -> dict[str, str]:
        """Return the header with the token."""
        token = _find_token(_find_request_url())
        return {} if token is None else {"Authorization": f"Bearer {token}"}


def _find_token(url: str) -> str | None:
    """Return the token for a request to `url`; None if a proxy would receive the request."""
    from requests.utils import get_environ_proxies

    token = find_request_token(url)
    return None if token is None or get_environ_proxies(url) else token


def _find_request_url() -> str:
    """Return the URL of the request whose headers MLflow collects; empty if it is unknown.

    MLflow does not pass the URL to a provider of headers, so it is read from the calling function.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "http_request":
        frame = frame.f_back
    return "" if frame is None else str(frame.f_locals.get("url", ""))
