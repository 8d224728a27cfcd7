"""Requests to the embedded web services with their token."""

from __future__ import annotations

from typing import Any
from urllib.request import Request, urlopen

from hpsearch.storage.web.token import find_token


def open_url(target: str | Request) -> Any:
    """Open a URL or a request like `urlopen`, with the token of the service if it is an embedded one."""
    request = Request(target) if isinstance(target, str) else target
    if (token := find_token(request.full_url)) is not None:
        request.add_header("Authorization", f"Bearer {token}")
    return urlopen(request, timeout=300)
