"""Whether the MLflow server answers, and its errors in one line."""

from __future__ import annotations

import base64
import os
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

from hpsearch.storage.errors import AwayError, StorageError, one_line

T = TypeVar("T")

_LONGEST = 200  # characters of an error in a line


class TrackingAwayError(AwayError):
    """The tracking server does not answer, or not yet: what is logged can wait for it."""


def check_server(uri: str, *, setting: str = "--tracking-uri") -> None:
    """Ask the tracking server for its health.

    Raises:
        TrackingAwayError: no MLflow server answers there, or one that is not ready.
        StorageError: `uri` is not an HTTP address, or what answers there is something else.
    """
    parts = urlsplit(uri)
    shown = uri if "@" not in parts.netloc else uri.replace(parts.netloc, parts.netloc.rpartition("@")[2])
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise StorageError(f"{setting} {shown}: must be the http(s):// address of an MLflow tracking server")
    if "@" in parts.netloc:
        raise StorageError(
            f"{setting} {shown}: must not hold a password; set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD instead"
        )
    remedy = "start the MLflow server, or correct the address"
    try:
        with _get(uri, "/health") as reply:
            if reply.status == 200 and reply.read(16).strip() == b"OK":
                return
        raise StorageError(f"{setting} {shown}: what answers there is not an MLflow server; {remedy}")
    except urllib.error.HTTPError as error:
        if error.code == 401:
            remedy = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD to a login of its"
        kind = TrackingAwayError if error.code >= 500 else StorageError
        raise kind(f"{setting} {shown}: answers {error.code} {error.reason}; {remedy}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise TrackingAwayError(f"{setting} {shown}: no MLflow server answers ({reason}); {remedy}") from None


def _get(uri: str, path: str) -> Any:
    """Open a page of the server, with the login and the authority that MLflow's client takes from the environment."""
    request = urllib.request.Request(uri.rstrip("/") + path)  # noqa: S310 the scheme is checked
    user, password = (os.environ.get(f"MLFLOW_TRACKING_{name}", "") for name in ("USERNAME", "PASSWORD"))
    if user or password:
        login = base64.b64encode(f"{user}:{password}".encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {login}")
    elif token := os.environ.get("MLFLOW_TRACKING_TOKEN"):
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    authority = os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH")
    context = ssl.create_default_context(cafile=authority) if authority else None
    return urllib.request.urlopen(request, timeout=5, context=context)  # noqa: S310 as above


def server_version(uri: str) -> str | None:
    """Return the version that the tracking server says it has; None where it does not tell.

    Args:
        uri: of a server that answers, see `check_server`.
    """
    try:
        with _get(uri, "/version") as reply:
            said: str = reply.read(40).decode(errors="replace").strip()
    except (OSError, ValueError):
        return None
    return said if said[:1].isdigit() else None


# The server understands the request and will never take it, however often it is repeated.
_REFUSALS = {"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS", "BAD_REQUEST"}
_REFUSALS |= {"INVALID_STATE", "ENDPOINT_NOT_FOUND", "NOT_IMPLEMENTED", "FEATURE_DISABLED"}

_DUPLICATE = re.compile("duplicate (key|entry)|unique constraint", re.IGNORECASE)  # by Postgres, MySQL, SQLite


def is_away(error: BaseException) -> bool:
    """Whether the same request may succeed later: no answer, a server that is starting, or that lets us in later."""
    import requests
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        return error.error_code not in _REFUSALS
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return error.response.status_code >= 500 or error.response.status_code in {401, 403, 408, 425, 429}
    return isinstance(error, requests.RequestException | TrackingAwayError | ConnectionError | TimeoutError)


def unless_missing(call: Callable[..., T], *arguments: Any, also: str = "") -> T | None:
    """Return the answer of a client call; None where MLflow has no such thing, or answers `also`."""
    from mlflow.exceptions import MlflowException

    try:
        return call(*arguments)
    except MlflowException as error:
        if error.error_code in {"RESOURCE_DOES_NOT_EXIST", also}:
            return None
        raise


def is_duplicate(error: BaseException) -> bool:
    """Whether another process wrote the same row in between: MLflow looks before it writes, and finds it next time."""
    return bool(_DUPLICATE.search(str(error)))


def unreachable(error: BaseException | None) -> bool:
    """Whether the server gave no answer at all, so that nothing else need be asked of it now."""
    import requests

    while error is not None:
        if isinstance(error, requests.ConnectionError | requests.Timeout | TrackingAwayError):
            return True
        error = error.__cause__ or error.__context__
    return False


def describe_error(error: BaseException) -> str:
    """Return an error of MLflow's client as one line; without an answer it is the cause of the broken connection."""
    if not isinstance(error, StorageError) and unreachable(error):
        while (cause := error.__cause__ or error.__context__) is not None:
            error = cause
        return f"no answer: {getattr(error, 'strerror', None) or error}"
    return one_line(error, _LONGEST)


@contextmanager
def mlflow_request(what: str) -> Iterator[None]:
    """Turn every error of MLflow's client into a `StorageError` of one line.

    Args:
        what: the request, after "MLflow did not": ``list the runs of 12``.

    Raises:
        StorageError: the request failed.
    """
    from mlflow.exceptions import MlflowException

    try:
        yield
    except StorageError:
        raise
    except Exception as error:  # the client passes on errors of its transport and of artifact stores
        kind = "" if isinstance(error, MlflowException) else f"{type(error).__name__}: "
        raise StorageError(f"MLflow did not {what}: {kind}{describe_error(error)}") from error


def all_pages(search: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
    """Yield all results of a paginated search of MLflow's client."""
    token = None
    while True:
        page = search(*arguments, max_results=1000, page_token=token)
        yield from page
        if not (token := page.token):
            return
