"""Connections to embedded servers: without libpq's environment variables, and only to a process of the right user."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hpsearch.storage.sockets import find_server_users

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

# A parameter of libpq without another effect, which marks the URLs of embedded servers. Its value ends with the id of
# the user that runs the server; in URLs of earlier versions it does not.
_MARKER, _MARKED = "fallback_application_name", "hpsearch-embedded"

# The URL of an embedded server, or this package, sets the parameters of these variables.
_OVERRIDDEN = {
    "PGAPPNAME",
    "PGCONNECT_TIMEOUT",
    "PGDATABASE",
    "PGHOST",
    "PGPASSWORD",
    "PGPORT",
    "PGREQUIREAUTH",
    "PGSSLMODE",
    "PGUSER",
}

_lock = threading.RLock()


def make_embedded_query(uid: int) -> str:
    """Return the part of a URL's query that marks an embedded server.

    Args:
        uid: the id of the user that runs the server.
    """
    return f"{_MARKER}={_MARKED}-{uid}"


def is_embedded_postgres(url: URL) -> bool:
    """Return whether the URL is that of an embedded server."""
    return str(url.query.get(_MARKER)).startswith(_MARKED)


def check_server_user(url: URL) -> None:
    """Check, before a connection to an embedded server, that no other user's process has taken its port.

    Such a process could forward the login to the server on its new port, and then use the session. Other URLs are not
    checked.

    Raises:
        psycopg2.OperationalError: another user's process, or none, listens on the port.
    """
    check_server_user_of({"port": url.port, **url.query})


def check_server_user_of(parameters: Mapping[str, Any]) -> None:
    """Check the user of the server like `check_server_user`, with libpq's parameters."""
    if str(parameters.get("host", "")).startswith("/"):  # a socket in a private folder
        return
    marked = re.fullmatch(rf"{_MARKED}-(\d+)", str(parameters.get(_MARKER)))
    if marked is None:
        return
    port, allowed = int(parameters["port"]), {int(marked[1]), os.geteuid()}
    if (users := find_server_users(port)) is None or (users and users <= allowed):
        return
    import psycopg2

    if not users:  # the port must not be tried: another user's process could take it at this moment
        raise psycopg2.OperationalError(f"connection refused: no process listens on port {port}")
    raise psycopg2.OperationalError(
        f"port {port} of the embedded Postgres belongs to a process of another user (uid {min(users - allowed)}); "
        "restart the services with hpsearch up"
    )


def list_variables(environment: Mapping[str, str] | None = None) -> list[str]:
    """Return the sorted names of the variables that libpq may read: those that begin with PG."""
    return sorted(name for name in (os.environ if environment is None else environment) if name.startswith("PG"))


@contextmanager
def ignore_variables(url: URL) -> Iterator[None]:
    """Hide libpq's environment variables in this block, in which a connection to an embedded server is opened.

    The user sets the variables for other servers. Some of them, such as PGSERVICE and PGTZ, cannot be overridden by a
    parameter of the connection. They stay in force for other URLs, and for the code of objectives.
    """
    if not is_embedded_postgres(url):
        yield
        return
    with _lock:
        hidden = {name: os.environ.pop(name) for name in list_variables() if name not in _OVERRIDDEN}
        try:
            yield
        finally:
            os.environ.update(hidden)
