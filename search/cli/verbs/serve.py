"""``hpsearch serve``: a service in the foreground, as containers run it."""

from __future__ import annotations

import os
import socket
from typing import Annotated

import typer

from hpsearch.search.cli import options as o

Host = Annotated[str, typer.Option("--host", help="Address to listen on; neither service knows users.")]


def register(app: typer.Typer) -> None:
    """Add the verbs to the app."""
    group = typer.Typer(help="Run one service in the foreground.", no_args_is_help=True)
    group.command()(mlflow)
    group.command()(dashboard)
    app.add_typer(group, name="serve")


def mlflow(
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535)] = 5000,
    artifacts: Annotated[
        str,
        typer.Option(
            "--artifacts",
            envvar="HPSEARCH_ARTIFACTS",
            show_envvar=True,
            help="Folder or URL (s3://BUCKET/PREFIX) that holds the artifacts.",
        ),
    ] = "artifacts",
    allowed_hosts: Annotated[
        str | None,
        typer.Option("--allowed-hosts", help="Host headers to answer, with ports, separated by commas."),
    ] = None,
) -> None:
    """Run the MLflow server on the database of MLFLOW_BACKEND_STORE_URI."""
    from hpsearch.search.errors import SearchError
    from hpsearch.storage.database.connect import connect
    from hpsearch.storage.embedded.services import mlflow_command
    from hpsearch.storage.urls import normalise

    variable = "MLFLOW_BACKEND_STORE_URI"
    if not (given := os.environ.get(variable)):
        raise SearchError(f"{variable} is not set: it names the Postgres database that MLflow keeps its runs in")
    url = normalise(given, setting=variable)
    connect(url, application_name="hpsearch serve", setting=variable).close()
    _check_free(host, port)
    hosts = allowed_hosts.split(",") if allowed_hosts else None
    command, environment = mlflow_command(host=host, port=port, artifacts=artifacts, allowed_hosts=hosts)
    os.execve(command[0], command, {**os.environ, **environment, variable: url})  # noqa: S606 becomes the service


def _check_free(host: str, port: int) -> None:
    from hpsearch.search.errors import SearchError

    try:
        with socket.create_server((host, port)):
            return
    except OSError as error:
        raise SearchError(
            f"--port {port}: cannot be listened on at {host} ({error.strerror}); choose another"
        ) from None


def dashboard(
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535)] = 8080,
    storage_url: o.StorageUrl = None,
    tracking_uri: o.TrackingUri = None,
    read_only: Annotated[
        bool,
        typer.Option(
            "--read-only",
            envvar="HPSEARCH_DASHBOARD_READ_ONLY",
            show_envvar=True,
            help="Show only: what would delete, rename or note is refused.",
        ),
    ] = False,
) -> None:
    """Run the Optuna dashboard over a cached storage; with a tracking server, notice what is promoted there."""
    from hpsearch.search.dashboard import serve
    from hpsearch.search.errors import SearchError

    if storage_url is None:
        raise SearchError("--storage-url is missing: give the database, or set HPSEARCH_STORAGE_URL")
    serve(storage_url, tracking_uri, host=host, port=port, read_only=read_only)
