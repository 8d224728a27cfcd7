"""The access token of the embedded web services: its file, and the addresses that it may be sent to."""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import re
import secrets
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

from hpsearch.storage.errors import StorageError, format_os_error
from hpsearch.storage.files import write_private
from hpsearch.storage.home import STATE_FILE, find_known_homes, read_own_text
from hpsearch.storage.sockets import LOOPBACK, is_own_server

TOKEN_VARIABLE = "HPSEARCH_WEB_TOKEN"  # noqa: S105 the name of a variable
AUTH_NAME = "hpsearch"  # value of MLFLOW_TRACKING_AUTH that selects storage.mlflow.token_auth
TOKEN_FILE = "web-token"  # noqa: S105 the name of a file
# Prometheus sends its token to any process at the port of `serve metrics`, so it is not that of the other services.
METRICS_TOKEN_FILE = "metrics-token"  # noqa: S105 the name of a file
_CREATORS = {TOKEN_FILE: "up", METRICS_TOKEN_FILE: "serve metrics"}  # commands
TOKEN_PARAMETER = "token"  # noqa: S105 the name of a query parameter

# It begins after a space, because it could be the parameter of a link to another server, which would get the token. It
# ends where a terminal may end a link, and before a second address.
_LINK = re.compile(r"(?<!\S)http://127\.0\.0\.1:\d+(?:(?!://)[\w/#?&=.%+~:@,;-])*", re.ASCII)


def load_or_create_token(home: Path, file: str = TOKEN_FILE) -> str:
    """Return the token of the installation in `home`, which is created (mode 0600) if it is missing.

    Args:
        home: home folder.
        file: name of the file, `TOKEN_FILE` or `METRICS_TOKEN_FILE`.
    """
    if (token := read_token(home, file)) is None:
        token = secrets.token_urlsafe(24)
        write_private(home / file, token + "\n")
    return token


def read_token(home: Path, file: str = TOKEN_FILE) -> str | None:
    """Return the token of the installation in `home`; None if it has none.

    Args:
        home: home folder.
        file: name of the file, `TOKEN_FILE` or `METRICS_TOKEN_FILE`.

    Raises:
        StorageError: the file cannot be read or is damaged, or it or a link at its path belongs to another user.
    """
    try:
        token = read_own_text(home / file).strip()
        if not re.fullmatch(r"[\w.~-]*", token, re.ASCII):  # it becomes a part of headers and links
            raise OSError(errno.EINVAL, "it is damaged")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        path, command = str(home / file), _CREATORS[file]
        raise StorageError(
            f"the token file {path!r} cannot be read ({format_os_error(error)}): delete it, then run hpsearch {command}"
        ) from None
    return token or None


def is_embedded(url: str) -> bool:
    """Return whether an embedded service of this user has, or had, this address."""
    return (port := _find_port(url)) is not None and is_embedded_port(port)


def is_embedded_port(port: int) -> bool:
    """Return whether an embedded web service of this user has, or had, this port of 127.0.0.1."""
    with suppress(StorageError):
        return any(port in ports or port in former for ports, former in map(_read_ports, find_known_homes()))
    return False


def find_token(url: str) -> str | None:
    """Return the token for a link to `url`; None if no embedded service of this user has this address.

    A service of another user may have bound the port of a stopped service. Therefore, on Linux, the token is returned
    only if the socket that listens on the port belongs to this user.
    """
    port = _find_port(url)
    return None if port is None or not is_own_server(port) else find_request_token(url)


def find_request_token(url: str) -> str | None:
    """Return the token for a request to `url`; None if no embedded service has this address.

    The user of the server is not checked: the request must use a connection that `storage.web.connections` checks.
    """
    if (port := _find_port(url)) is not None:
        with suppress(StorageError):
            for home in find_known_homes():
                if port in _read_ports(home)[0]:
                    return read_token(home)
    return None


def _find_port(url: str) -> int | None:
    """Return the port of an address that an embedded service may have; None for other addresses."""
    with suppress(ValueError):  # an invalid host or port
        parts = urlsplit(url)
        # The whole netloc is compared, because requests takes `http://other\@127.0.0.1:5000` as a link to `other`.
        if parts.scheme == "http" and parts.port is not None and parts.netloc == f"{LOOPBACK}:{parts.port}":
            return parts.port
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


def _read_ports(home: Path) -> tuple[set[int], set[int]]:
    """Return the current and the former ports of the web services in `home`."""
    ports, former = set[int](), set[int]()
    with suppress(OSError, ValueError, KeyError, TypeError):
        state = json.loads((home / STATE_FILE).read_bytes())
        for service in ("mlflow", "dashboard"):
            former.update(state[service].get("former_ports", ()))
            ports.update({state[service]["port"]} - {None})
    return ports, former
