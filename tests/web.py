"""Requests to web services on this machine."""

from __future__ import annotations

import socket
from typing import Any
from urllib.request import Request, urlopen

from hpsearch.storage.web.token import find_token


def open_url(target: str | Request) -> Any:
    """Open a URL or a request like `urlopen`, with the token of the service if it is an embedded one."""
    request = Request(target) if isinstance(target, str) else target
    if (token := find_token(request.full_url)) is not None:
        request.add_header("Authorization", f"Bearer {token}")
    return urlopen(request, timeout=300)


def answers(port: int) -> bool:
    """Return whether a service accepts connections on a port of this machine."""
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
