"""Health checks of the MLflow server, and the classification of its errors."""

from __future__ import annotations

import base64
import http.client
import os
import re
import shlex
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

from hpsearch.causes import iterate_causes
from hpsearch.storage.errors import ServiceUnavailableError, StorageError, format_error
from hpsearch.storage.mlflow.credentials import check_credentials, is_configured
from hpsearch.storage.web.connections import OwnServerHandler
from hpsearch.storage.web.token import find_request_token, is_embedded

T = TypeVar("T")

_MAX_ERROR_LENGTH = 200  # characters
_TIMEOUT_SECONDS = 5.0  # of a health check


class TrackingUnavailableError(ServiceUnavailableError):
    """A tracking server that does not answer or is not ready; records stay in the journal until it is ready."""


def check_server(uri: str, *, setting: str = "--tracking-uri") -> None:
    """Check that the tracking server answers and is healthy.

    Args:
        uri: the address of the server.
        setting: the name of the setting that contains the address, for messages.

    Raises:
        TrackingUnavailableError: no MLflow server answers, or it is not ready.
        StorageError: `uri` is not an HTTP address, another kind of server answers, or this process has credentials that
            the user has not configured for this address.
    """
    try:
        parts = urlsplit(uri)
        is_address = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid host or port
        parts, is_address = urlsplit(""), False
    shown = uri if "@" not in uri else f"{uri.partition('//')[0]}//{uri.rpartition('@')[2]}"
    if not is_address:
        raise StorageError(f"{setting} {shown} must be the http(s):// address of an MLflow tracking server")
    if "@" in parts.netloc:
        raise StorageError(
            f"{setting} {shown} must not contain a password; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )
    remedy = "start the MLflow server, or correct the address"
    try:
        with _get(uri, "/health") as reply:
            if reply.status != 200 or reply.read(16).strip() != b"OK":
                raise StorageError(f"{setting} {shown} is not an MLflow server; {remedy}")
        with _get(uri, "/version"):  # needs the credentials, unlike /health
            return
    except urllib.error.HTTPError as error:
        if error.code == 401:
            remedy = "set MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        elif error.code < 400:
            remedy = f"hpsearch follows redirects of a configured server only; set --tracking-uri {shlex.quote(shown)}"
        error_type = TrackingUnavailableError if error.code >= 500 else StorageError
        raise error_type(f"{setting} {shown}: the server answers {error.code} {error.reason}; {remedy}") from None
    except (OSError, ValueError, http.client.IncompleteRead) as error:  # also RemoteDisconnected, an OSError
        reason = getattr(error, "reason", error)
        raise TrackingUnavailableError(f"{setting} {shown}: no MLflow server answers ({reason}); {remedy}") from None
    except http.client.HTTPException:  # another protocol
        raise StorageError(f"{setting} {shown} is not an MLflow server; {remedy}") from None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Handler that makes a redirect an HTTPError."""

    def redirect_request(self, *_: object) -> None:
        return None


def _get(uri: str, path: str) -> Any:
    """Open a page of the server with the credentials and the CA that MLflow's client reads from the environment."""
    check_credentials(uri)
    request = urllib.request.Request(uri.rstrip("/") + path)  # noqa: S310 the scheme is checked
    user, password = (os.environ.get(f"MLFLOW_TRACKING_{name}", "") for name in ("USERNAME", "PASSWORD"))
    handlers: list[urllib.request.BaseHandler] = []
    if is_embedded(uri):
        handlers += [OwnServerHandler(), urllib.request.ProxyHandler({})]  # a proxy must not receive the token
        if (token := find_request_token(uri)) is not None:
            request.add_unredirected_header("Authorization", f"Bearer {token}")
    elif user or password:
        login = base64.b64encode(f"{user}:{password}".encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {login}")
    elif token := os.environ.get("MLFLOW_TRACKING_TOKEN"):
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    authority = os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH")
    context = ssl.create_default_context(cafile=authority) if authority else None
    handlers.append(urllib.request.HTTPSHandler(context=context))
    if not is_configured(uri):
        handlers.append(_NoRedirects())
    return urllib.request.build_opener(*handlers).open(request, timeout=_TIMEOUT_SECONDS)


def read_server_version(uri: str) -> str | None:
    """Return the version of the tracking server; None if the server does not report its version.

    Args:
        uri: the address of a server that passed `check_server`.
    """
    try:
        with _get(uri, "/version") as reply:
            version: str = reply.read(40).decode(errors="replace").strip()
    except (OSError, ValueError, http.client.HTTPException):
        return None
    return version if version[:1].isdigit() else None


# Error codes with which the server rejects a request permanently.
_REJECTIONS = {"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS", "BAD_REQUEST"}
_REJECTIONS |= {"INVALID_STATE", "ENDPOINT_NOT_FOUND", "NOT_IMPLEMENTED", "FEATURE_DISABLED"}

_DUPLICATE = re.compile("duplicate (key|entry)|unique constraint", re.IGNORECASE)  # by Postgres, MySQL, SQLite


def is_retryable(error: BaseException) -> bool:
    """Return whether a retry of the request may succeed.

    This is the case if the server did not answer, is starting, or denied access.
    """
    import requests
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        return error.error_code not in _REJECTIONS
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return error.response.status_code >= 500 or error.response.status_code in {401, 403, 408, 425, 429}
    return isinstance(error, requests.RequestException | TrackingUnavailableError | ConnectionError | TimeoutError)


def get_or_none(call: Callable[..., T], *arguments: Any, also_ignored: str = "") -> T | None:
    """Return the result of a call of MLflow's client; None if the object does not exist.

    Args:
        call: the client's method.
        *arguments: the arguments of the method.
        also_ignored: a further MLflow error code for which the result is None.
    """
    from mlflow.exceptions import MlflowException

    try:
        return call(*arguments)
    except MlflowException as error:
        if error.error_code in {"RESOURCE_DOES_NOT_EXIST", also_ignored}:
            return None
        raise


def is_duplicate(error: BaseException) -> bool:
    """Return whether another process wrote the same row at the same time, so that MLflow finds the row on a retry."""
    return bool(_DUPLICATE.search(str(error)))


def is_unreachable(error: BaseException | None) -> bool:
    """Return whether the error means that the server did not answer, so that other requests would fail too."""
    import requests

    kinds = (requests.ConnectionError, requests.Timeout, TrackingUnavailableError)
    return any(isinstance(each, kinds) for each in iterate_causes(error))


def describe_error(error: BaseException) -> str:
    """Return an error of MLflow's client as one line.

    If the server did not answer, the line contains the cause of the failed connection.
    """
    if not isinstance(error, StorageError) and is_unreachable(error):
        *_, error = iterate_causes(error)
        return f"no answer: {getattr(error, 'strerror', None) or error}"
    return format_error(error, _MAX_ERROR_LENGTH)


@contextmanager
def mlflow_request(description: str) -> Iterator[None]:
    """Convert every error of MLflow's client within the context to a `StorageError` of one line.

    Args:
        description: the request, as the continuation of "MLflow did not", such as ``list the runs of 12``.

    Raises:
        TrackingUnavailableError: the server did not answer.
        StorageError: the request failed for another reason.
    """
    from mlflow.exceptions import MlflowException

    try:
        yield
    except StorageError:
        raise
    except Exception as error:  # the client also raises errors of HTTP libraries and artifact stores
        error_type = "" if isinstance(error, MlflowException) else f"{type(error).__name__}: "
        kind = TrackingUnavailableError if is_unreachable(error) else StorageError
        raise kind(f"MLflow did not {description}: {error_type}{describe_error(error)}") from error


def iterate_pages(search: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
    """Yield all results of a paginated search of MLflow's client."""
    token = None
    while True:
        page = search(*arguments, max_results=1000, page_token=token)
        yield from page
        if not (token := page.token):
            return
