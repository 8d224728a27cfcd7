"""The rule by which the web services accept requests: a token, as in Jupyter, and no requests of other web sites.

A program sends the token as ``Authorization: Bearer TOKEN``. A browser opens a link with ``?token=TOKEN`` once, and
receives a cookie. All servers on 127.0.0.1 share cookies, whatever their ports are. Requests with a cookie are
therefore accepted only from the service's own pages and for links, by the header Sec-Fetch-Site of the browser, and on
Linux only from processes of the user whose browser received the cookie. Behind a proxy, or a port that ssh forwards,
all browsers have the same user, who is unknown or that of the ssh server.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from typing import Any, Self
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from hpsearch.storage.sockets import LOOPBACK, find_client_user, is_established
from hpsearch.storage.web.token import TOKEN_PARAMETER, derive

_NO_USER = -1  # no user has this id
_COOKIE_SECONDS = 30 * 24 * 3600
_HEALTH_PATH = "/health"
_BEARER = "bearer "
_FORWARDED = "x-forwarded-for"  # uvicorn takes the address of the client from it

# The browser omits a SameSite=Strict cookie when the user opens a link in another site's page or in a local file, such
# as a report. The script repeats the request from this page, which includes the cookie.
_SIGN_IN_PAGE = b"""<!doctype html><meta charset="utf-8"><title>hpsearch: sign in</title>
<body style="font: 16px/1.5 sans-serif; margin: 4em auto; max-width: 36em">
<h1>Sign in</h1>
<p>This service needs the access token of its installation. Run <code>hpsearch up</code> in a terminal
and open the printed link, or paste the token here.</p>
<form><input name="token" type="password" aria-label="Access token" autofocus> <button>Sign in</button></form>
<script>
const query = new URLSearchParams(location.search);
if (!query.has("token")) { query.set("token", ""); location.replace("?" + query + location.hash); }
</script>
"""
_SIGN_IN_TEXT = (
    b"The token is missing or not valid: send the header Authorization: Bearer TOKEN, or open a link of hpsearch up.\n"
)
_FOREIGN_TEXT = b"This service rejects requests of other web sites.\n"
_WORKER_TEXT = b"This service has no service workers.\n"


@dataclass(frozen=True)
class Request:
    """Parts of an HTTP request that decide on access.

    Attributes:
        headers: values by name in lower case.
        ports: ports of the server and of the client if both are on 127.0.0.1; None otherwise.
        is_connected: function that returns whether the client's connection is still open.
        root: start of the path that the server adds to the paths of the application, such as uvicorn's root path.
    """

    method: str
    scheme: str
    path: str
    query: str
    headers: Mapping[str, str]
    ports: tuple[int, int] | None = None
    is_connected: Callable[[], bool] = lambda: True
    root: str = ""


@dataclass(frozen=True)
class Reply:
    """Reply to a request that does not reach the application."""

    status: HTTPStatus
    body: bytes = b""
    headers: Sequence[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Guard:
    """Decision on each request of a web service.

    Args:
        token: the token of the service; None accepts all requests that are not from other web sites.
        allowed_origins: origins of pages besides the service's own, such as the public address of a proxy.
        answers_health: whether the guard itself answers requests for /health, for applications without such a page.
    """

    token: str | None
    allowed_origins: Sequence[str] = ()
    answers_health: bool = False

    def check(self, request: Request) -> Reply | None:
        """Return the reply to a request that is not accepted; None if the application may answer."""
        if self._is_foreign(request):
            return make_reply(HTTPStatus.FORBIDDEN, _FOREIGN_TEXT)
        if request.headers.get("service-worker") == "script":  # the services have none; it could be an artifact
            return make_reply(HTTPStatus.FORBIDDEN, _WORKER_TEXT)
        if request.path == _HEALTH_PATH:  # needs no token
            return make_reply(HTTPStatus.OK, b"OK\n") if self.answers_health else None
        if self.token is None:
            return None
        authorization = request.headers.get("authorization", "")
        if authorization.lower().startswith(_BEARER):
            is_valid = _equals(authorization[len(_BEARER) :].strip(), self.token)
            return None if is_valid else make_reply(HTTPStatus.UNAUTHORIZED, _SIGN_IN_TEXT)
        has_cookie = _equals(self._read_cookie(request), self._make_cookie(request))
        pairs = parse_qsl(request.query, keep_blank_values=True)
        given = [value for name, value in pairs if name == TOKEN_PARAMETER]
        is_signing_in = bool(given) and _equals(given[0], self.token)
        if given and request.method == "GET" and (has_cookie or is_signing_in):
            rest = [pair for pair in pairs if pair[0] != TOKEN_PARAMETER]
            return self._redirect(request, rest, is_signing_in=is_signing_in)
        if not has_cookie:
            is_page = request.method == "GET" and "text/html" in request.headers.get("accept", "")
            return make_reply(HTTPStatus.UNAUTHORIZED, _SIGN_IN_PAGE if is_page else _SIGN_IN_TEXT)
        return None if _is_own_page_or_link(request) else make_reply(HTTPStatus.FORBIDDEN, _FOREIGN_TEXT)

    def _is_foreign(self, request: Request) -> bool:
        origin = request.headers.get("origin")
        if origin is None or origin in self.allowed_origins:
            return False
        return urlsplit(origin).netloc != request.headers.get("host", "")

    def _cookie_name(self) -> str:
        return f"hpsearch-{derive(self.token or '', 'cookie name')[:8]}"

    def _make_cookie(self, request: Request) -> str:
        # Programs of other users receive the cookie if a page in the browser uses their port.
        ports = None if _FORWARDED in request.headers else request.ports
        user = None if ports is None else find_client_user(*ports)
        if user is not None and not request.is_connected():  # it may be the user of a later connection
            user = _NO_USER
        return derive(self.token or "", f"cookie of {user}")

    def _read_cookie(self, request: Request) -> str:
        try:
            cookies: SimpleCookie = SimpleCookie(request.headers.get("cookie", ""))
        except CookieError:
            return ""
        found = cookies.get(self._cookie_name())
        return found.value if found else ""

    def _redirect(self, request: Request, pairs: list[tuple[str, str]], *, is_signing_in: bool) -> Reply:
        # A path with two leading slashes would be the address of another server; browsers ignore tabs between them.
        target = quote("/" + request.path.lstrip("/\\\t\r\n ")) + (f"?{urlencode(pairs)}" if pairs else "")
        secure = "; Secure" if request.scheme == "https" else ""
        cookie = f"{self._cookie_name()}={self._make_cookie(request)}; Path=/; Max-Age={_COOKIE_SECONDS}"
        headers = [("Location", target), ("Set-Cookie", f"{cookie}; HttpOnly; SameSite=Strict{secure}")]
        if is_signing_in:  # another program may have used the address earlier, and left scripts in the browser
            headers.append(("Clear-Site-Data", '"cache", "storage"'))
        return make_reply(HTTPStatus.SEE_OTHER, headers=headers)


def _is_own_page_or_link(request: Request) -> bool:
    """Return whether a page of the service made the request, or the user followed a link to one of its pages."""
    site, mode, destination = (request.headers.get(f"sec-fetch-{name}") for name in ("site", "mode", "dest"))
    is_link = request.method == "GET" and mode == "navigate" and destination == "document"
    return is_link or site in {"same-origin", "none", None}


def _equals(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())


def make_reply(status: HTTPStatus, body: bytes = b"", headers: Sequence[tuple[str, str]] = ()) -> Reply:
    """Return a reply with a page or a text, and the headers that protect it."""
    kind = "text/html" if body.startswith(b"<!doctype") else "text/plain"
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; form-action 'self'"
    added = [
        ("Content-Type", f"{kind}; charset=utf-8"),
        ("Content-Length", str(len(body))),
        ("Cache-Control", "no-store"),
        ("Referrer-Policy", "no-referrer"),
        ("Content-Security-Policy", f"{policy}; frame-ancestors 'none'"),
    ]
    if status == HTTPStatus.UNAUTHORIZED:
        added.append(("WWW-Authenticate", "Bearer"))
    return Reply(status, body, [*added, *headers])


Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
_Receive = Callable[[], Awaitable[dict[str, Any]]]
_Send = Callable[[dict[str, Any]], Awaitable[None]]
Asgi = Callable[[dict[str, Any], _Receive, _Send], Awaitable[None]]


SERVER_END = "hpsearch.server_end"  # key of a WSGI environment: the `ServerEnd`


class ServerEnd(tuple[Any, ...]):
    """Host and port of the server's end of a connection, with its socket.

    The host and the port are those of the socket, because a client can choose those of the request's headers.
    """

    def __new__(cls, connection: socket.socket) -> Self:
        """Create the tuple from the address of the server's socket."""
        return super().__new__(cls, connection.getsockname()[:2])

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def is_connected(self) -> bool:
        """Return whether the connection is still open."""
        return is_established(self._connection)


def _describe_connection(client: Sequence[Any] | None, server: object) -> dict[str, Any]:
    """Return the attributes of a `Request` that describe the connection.

    Args:
        client: host and port of the client's end.
        server: the server's end. Without a `ServerEnd`, the user of the client is unknown.
    """
    if client is None or not isinstance(server, ServerEnd) or {client[0], server[0]} != {LOOPBACK}:
        return {}
    return {"ports": (int(server[1]), int(client[1])), "is_connected": server.is_connected}


def guard_wsgi(app: Wsgi, guard: Guard) -> Wsgi:
    """Wrap a WSGI application with a guard, for a server that sets `SERVER_END`."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        headers = {n[5:].replace("_", "-").lower(): v for n, v in environ.items() if n.startswith("HTTP_")}
        request = Request(
            environ["REQUEST_METHOD"],
            environ["wsgi.url_scheme"],
            environ.get("PATH_INFO", ""),
            environ.get("QUERY_STRING", ""),
            headers,
            **_describe_connection((environ.get("REMOTE_ADDR"), environ.get("REMOTE_PORT")), environ.get(SERVER_END)),
        )
        if (reply := guard.check(request)) is None:
            return app(environ, start_response)
        start_response(f"{reply.status.value} {reply.status.phrase}", list(reply.headers))
        return [reply.body]

    return answer


def guard_asgi(app: Asgi, guard: Guard) -> Asgi:
    """Wrap an ASGI application with a guard, for a server whose scopes have a `ServerEnd`.

    WebSocket connections, which the services do not use, are rejected.
    """

    async def answer(scope: dict[str, Any], receive: _Receive, send: _Send) -> None:
        if scope["type"] == "lifespan":
            return await app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        query = scope["query_string"].decode("latin-1")
        connection = _describe_connection(scope.get("client"), scope.get("server"))
        root = scope.get("root_path", "")
        request = Request(scope["method"], scope["scheme"], scope["path"], query, headers, root=root, **connection)
        reply = guard.check(request)
        if reply is None:
            return await app(scope, receive, send)
        encoded = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in reply.headers]
        await send({"type": "http.response.start", "status": reply.status.value, "headers": encoded})
        await send({"type": "http.response.body", "body": reply.body})
        return None

    return answer
