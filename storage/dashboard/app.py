"""The Optuna dashboard, served over a cached storage by waitress.

The dashboard's own command reads every study anew for each request: 7 s for a page of 10,000 trials, against 0.05 s.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hpsearch.storage.database.connect import check_database, make_engine
from hpsearch.storage.errors import StorageError
from hpsearch.storage.urls import normalise

if TYPE_CHECKING:
    from hpsearch.storage.mlflow.artifacts import RunArtifacts

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_READING = ("GET", "HEAD", "OPTIONS")

_Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def serve_dashboard(
    url: str, *, host: str, port: int, artifacts: RunArtifacts | None = None, read_only: bool = False
) -> None:
    """Serve the dashboard of the studies at `url` until the process is ended.

    Args:
        url: Postgres URL; a role that may read and write rows is enough.
        host: Address to listen on. The dashboard knows no users: whoever reaches it can delete studies.
        port: Port to listen on.
        artifacts: What the trials left in MLflow, to be shown beside them.
        read_only: Whether it only shows, and refuses to delete, rename or note.

    Raises:
        StorageError: The database cannot be used, or the address cannot be listened on.
    """
    import waitress

    check_database(url)
    app = _application(normalise(url), artifacts)
    if read_only:
        app = _read_only(app)
    if host in _LOOPBACK:
        app = _local_only(app)
    try:
        server = waitress.create_server(
            app, host=host, port=port, threads=8, ident=None,
            # Behind a proxy with TLS its redirects have to lead there again; nothing else is believed of these headers.
            trusted_proxy="*", trusted_proxy_headers={"x-forwarded-proto"}, clear_untrusted_proxy_headers=True,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise StorageError(f"--port {port} is in use on {host}: choose another with --port") from None
        raise StorageError(f"--host {host!r} --port {port} cannot be listened on ({error})") from None
    server.run()


def _application(url: str, artifacts: RunArtifacts | None) -> _Wsgi:
    import optuna_dashboard
    from optuna_dashboard import _app

    from hpsearch.storage.dashboard.feasible import feasible_front
    from hpsearch.storage.dashboard.fresh_storage import DashboardStorage

    _app.get_pareto_front_trials = feasible_front  # there is no setting for it
    engine = make_engine(url, application_name="hpsearch-dashboard", pool_size=4, pre_ping=False)
    app: _Wsgi = optuna_dashboard.wsgi(DashboardStorage(engine, patience=10.0), artifact_store=artifacts)
    return app


def _read_only(app: _Wsgi) -> _Wsgi:
    """Refuse all requests but those that read: the dashboard's pages send no other until somebody changes something."""

    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] in _READING:
            return app(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "application/json")])
        return [b'{"reason": "This dashboard is read-only."}\n']  # as its own errors are, which its pages show

    return guarded


def _local_only(app: _Wsgi) -> _Wsgi:
    """Refuse requests that a foreign web page makes the user's browser send here.

    A page may point a name of its own at 127.0.0.1 and then read and delete studies as if they were its own, or post
    to the address itself: the first shows in the Host header, the second in Origin.
    """

    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        origin = environ.get("HTTP_ORIGIN")
        hosts = [f"//{environ.get('HTTP_HOST', '')}", *([origin] if origin else [])]
        if all(_hostname(value) in _LOOPBACK for value in hosts):
            return app(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        return [b"This dashboard answers to 127.0.0.1 and localhost only.\n"]

    return guarded


def _hostname(value: str) -> str | None:
    try:
        return urlsplit(value).hostname
    except ValueError:
        return None
