"""The server of a WSGI application with a token; on a loopback address, it rejects requests for other hosts."""

from __future__ import annotations

import errno
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from hpsearch.storage.errors import StorageError
from hpsearch.storage.sockets import listen_exclusively
from hpsearch.storage.web.guard import SERVER_END, Guard, ServerEnd, Wsgi, guard_wsgi

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve_wsgi(app: Wsgi, *, host: str, port: int, token: str | None) -> None:
    """Serve an application until the process ends.

    Args:
        app: the application.
        host: address to listen on.
        port: port to listen on.
        token: token that requests must have; None to accept requests without a token.

    Raises:
        StorageError: the address cannot be bound.
    """
    import waitress
    from waitress.channel import HTTPChannel

    app = guard_wsgi(app, Guard(token, answers_health=True))
    if _is_loopback(host):
        app = _reject_foreign_hosts(app, {*_LOOPBACK, host})
    try:
        server = waitress.create_server(
            app, sockets=listen_exclusively(host, port), threads=8, ident=None,
            # Redirects must keep the scheme of a TLS proxy; no other forwarded header is trusted.
            trusted_proxy="*", trusted_proxy_headers={"x-forwarded-proto"}, clear_untrusted_proxy_headers=True,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise StorageError(f"--port {port} is in use on {host}; choose another port") from None
        raise StorageError(f"cannot listen on --host {host!r} --port {port} ({error})") from None
    HTTPChannel.task_class = _make_task_class(HTTPChannel.task_class)
    server.run()


def _make_task_class(base: Any) -> Any:
    """Return a class of waitress's tasks that adds the server's end of the connection to the environment."""

    class Task(base):  # type: ignore[misc]
        """Answer to a request."""

        def get_environment(self) -> dict[str, Any]:
            """Return the WSGI environment."""
            environ: dict[str, Any] = super().get_environment()
            with suppress(OSError):  # the client has closed the connection
                environ[SERVER_END] = ServerEnd(self.channel.socket)
            return environ

    return Task


def reject_unless(app: Wsgi, is_allowed: Callable[[dict[str, Any]], bool], content_type: str, reason: bytes) -> Wsgi:
    """Wrap an application so that it answers requests that are not allowed with status 403 and the reason."""

    def answer_if_allowed(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if is_allowed(environ):
            return app(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", content_type)])
        return [reason]

    return answer_if_allowed


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name
        return host in _LOOPBACK


def _reject_foreign_hosts(app: Wsgi, hosts: Container[str | None]) -> Wsgi:
    """Wrap an application so that it rejects requests for other hosts: a foreign name may resolve to 127.0.0.1."""
    reason = b"This service answers to 127.0.0.1 and localhost only.\n"
    return reject_unless(
        app,
        lambda environ: _parse_hostname(f"//{environ.get('HTTP_HOST', '')}") in hosts,
        "text/plain; charset=utf-8",
        reason,
    )


def _parse_hostname(value: str) -> str | None:
    try:
        return urlsplit(value).hostname
    except ValueError:
        return None
