"""libpq's environment variables, such as PGSERVICE, and the connections that must not use them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

# A parameter of libpq without another effect, which marks the URLs of embedded servers.
_MARKER, _MARKED = "fallback_application_name", "hpsearch-embedded"
EMBEDDED_QUERY = f"{_MARKER}={_MARKED}"

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


def is_embedded(url: URL) -> bool:
    """Return whether the URL is that of an embedded server."""
    return url.query.get(_MARKER) == _MARKED


def list_variables(environment: Mapping[str, str] | None = None) -> list[str]:
    """Return the sorted names of the variables that libpq may read: those that begin with PG."""
    return sorted(name for name in (os.environ if environment is None else environment) if name.startswith("PG"))


@contextmanager
def ignore_variables(url: URL) -> Iterator[None]:
    """Hide libpq's environment variables in this block, in which a connection to an embedded server is opened.

    The user sets the variables for other servers. Some of them, such as PGSERVICE and PGTZ, cannot be overridden by a
    parameter of the connection. They stay in force for other URLs, and for the code of objectives.
    """
    if not is_embedded(url):
        yield
        return
    with _lock:
        hidden = {name: os.environ.pop(name) for name in list_variables() if name not in _OVERRIDDEN}
        try:
            yield
        finally:
            os.environ.update(hidden)
