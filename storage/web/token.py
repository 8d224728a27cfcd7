"""The access token of the embedded web services: its file, and the addresses that it may be sent to."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

from hpsearch.storage.errors import StorageError, format_os_error
from hpsearch.storage.files import write_private
from hpsearch.storage.home import STATE_FILE, find_known_homes, read_own_text

TOKEN_VARIABLE = "HPSEARCH_WEB_TOKEN"  # noqa: S105 the name of a variable
AUTH_NAME = "hpsearch"  # value of MLFLOW_TRACKING_AUTH that selects storage.mlflow.token_auth
TOKEN_FILE = "web-token"  # noqa: S105 the name of a file
TOKEN_PARAMETER = "token"  # noqa: S105 the name of a query parameter

_LOOPBACK = "127.0.0.1"

# It ends where a terminal may end a link, and before a second address, which must not get the token.
_LINK = re.compile(r"http://127\.0\.0\.1:\d+(?:(?!://)[\w/#?&=.%+~:@,;-])*", re.ASCII)
_LISTENER = r" 0100007F:{port} 00000000:0000 0A \S+ \S+ \S+ +(\d+) "  # in /proc/net/tcp; the group is the user id


def load_or_create_token(home: Path) -> str:
    """Return the token of the installation in `home`, which is created (mode 0600) if it is missing."""
    if (token := read_token(home)) is None:
        token = secrets.token_urlsafe(24)
        write_private(home / TOKEN_FILE, token + "\n")
    return token


def read_token(home: Path) -> str | None:
    """Return the token of the installation in `home`; None if it has none.

    Raises:
        StorageError: the file cannot be read, or it or a link at its path belongs to another user.
    """
    try:
        return read_own_text(home / TOKEN_FILE).strip() or None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        path = str(home / TOKEN_FILE)
        raise StorageError(
            f"the token file {path!r} cannot be read ({format_os_error(error)}): delete it, then run hpsearch up"
        ) from None


def find_token(url: str) -> str | None:
    """Return the token for a request to `url`; None if no embedded service of this user has this address.

    A service of another user may have bound the port of a stopped service. Therefore, on Linux, the token is returned
    only if the socket that listens on the port belongs to this user.
    """
    with suppress(ValueError, StorageError):  # ValueError: an invalid host or port
        parts = urlsplit(url)
        # The whole netloc is compared, because requests takes `http://other\@127.0.0.1:5000` as a link to `other`.
        if parts.scheme == "http" and parts.port is not None and parts.netloc == f"{_LOOPBACK}:{parts.port}":
            for home in find_known_homes():
                if parts.port in _read_ports(home) and _was_own_listener(parts.port):
                    return read_token(home)
    return None


def add_token(url: str) -> str:
    """Return a link to an embedded service with its token as a query parameter; other links are unchanged."""
    if (token := find_token(url)) is None:
        return url
    parts = urlsplit(url)
    added = f"{TOKEN_PARAMETER}={quote(token)}"
    return urlunsplit(parts._replace(path=parts.path or "/", query=f"{parts.query}&{added}" if parts.query else added))


def add_tokens(text: str) -> str:
    """Return a text in which the links to embedded services have their token."""
    return _LINK.sub(lambda found: add_token(found[0]), text)


def derive(token: str, purpose: str) -> str:
    """Return a value that proves knowledge of the token, and does not reveal it: a keyed hash of `purpose`."""
    return hmac.new(token.encode(), purpose.encode(), hashlib.sha256).hexdigest()


def _read_ports(home: Path) -> set[int]:
    """Return the ports of the web services in `home`."""
    try:
        state = json.loads((home / STATE_FILE).read_bytes())
        return {int(state[service]["port"]) for service in ("mlflow", "dashboard") if state[service]["port"]}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


_checked_at: dict[int, float] = {}  # port -> time of the last positive check
_CHECK_SECONDS = 2.0  # the list of sockets of a busy machine is long


def _was_own_listener(port: int) -> bool:
    """Return whether a process of this user listened on the port at most two seconds ago."""
    if time.monotonic() - _checked_at.get(port, -_CHECK_SECONDS) < _CHECK_SECONDS:
        return True
    if not is_own_listener(port):
        return False
    _checked_at[port] = time.monotonic()
    return True


def is_own_listener(port: int) -> bool:
    """Return whether a process of this user listens on a port of 127.0.0.1; True where this is unknown (not Linux)."""
    try:
        sockets = Path("/proc/net/tcp").read_text(encoding="ascii")
    except OSError:
        return True
    found = re.search(_LISTENER.format(port=f"{port:04X}"), sockets)
    return found is not None and int(found[1]) == os.geteuid()
