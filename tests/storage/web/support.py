"""Requests to the embedded web services."""

from __future__ import annotations

import json
import urllib.error
from email.message import Message
from urllib.request import HTTPRedirectHandler, Request, build_opener

from hpsearch.storage.embedded.stack import StackInfo


def send_request(
    stack: StackInfo, service: str, method: str, path: str, body: object = None, **headers: str
) -> tuple[int, dict[str, str]]:
    url = {"mlflow": stack.tracking_uri, "dashboard": stack.dashboard_url}[service] + path
    data = None if body is None else json.dumps(body).encode()
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    request = Request(url, data=data, method=method, headers={"Content-Type": "application/json", **headers})
    opener = build_opener(_NoRedirect)
    try:
        with opener.open(request, timeout=300) as reply:
            return reply.status, _lower(reply.headers)
    except urllib.error.HTTPError as error:
        return error.code, _lower(error.headers)


def _lower(headers: Message) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        return None
