"""Commands `serve`: MLflow, the Optuna dashboard or the metrics as a process in the foreground."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated

import typer

from hpsearch.changeable_paths import find_changeable_part
from hpsearch.search.cli import options as o
from hpsearch.search.cli.app import SERVICES_SECTION, add_group, echo
from hpsearch.search.cli.services import NO_AUTH_WARNING

Host = Annotated[str, typer.Option("--host", help="Address to listen on")]
NoAuth = Annotated[
    bool, typer.Option("--no-auth", help="Accept requests without the token in HPSEARCH_WEB_TOKEN, from everyone")
]
_NO_AUTH_METRICS_WARNING = "warning: --no-auth: any client that reaches this address can read the metrics"


def _read_web_token(*, no_auth: bool, warning: str = NO_AUTH_WARNING) -> str | None:
    """Return the token that requests must have; None, with the warning, if `no_auth` is set."""
    from hpsearch.search.errors import SearchError
    from hpsearch.storage.web.token import TOKEN_VARIABLE

    if no_auth:
        echo(f"hpsearch: {warning}", err=True)
        return None
    if token := os.environ.get(TOKEN_VARIABLE):
        return token
    raise SearchError(f"{TOKEN_VARIABLE} is not set; set it to a random text of your choice, or give --no-auth")


_serve = add_group("serve", SERVICES_SECTION, "Run MLflow, the Optuna dashboard or the metrics.")


@_serve.command()
def mlflow(
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on")] = 5000,
    artifacts: Annotated[
        str,
        typer.Option(
            "--artifacts",
            envvar="HPSEARCH_ARTIFACTS",
            show_envvar=True,
            help="Folder or URL (s3://BUCKET/PREFIX) of MLflow's artifacts",
        ),
    ] = "artifacts",
    allowed_hosts: Annotated[
        str | None,
        typer.Option("--allowed-hosts", help="Accepted HTTP Host headers: HOST:PORT,HOST:PORT  [default: MLflow's]"),
    ] = None,
    no_auth: NoAuth = False,
) -> None:
    """Run MLflow on the database in MLFLOW_BACKEND_STORE_URI.

    Clients need HPSEARCH_WEB_TOKEN of this process: programs in MLFLOW_TRACKING_TOKEN, browsers once in the link
    http://HOST:PORT/?token=TOKEN.
    """
    from hpsearch.objectives.private_folders import open_private_folder
    from hpsearch.search.errors import SearchError
    from hpsearch.storage.database.connect import connect
    from hpsearch.storage.embedded.services import make_mlflow_command, require_server_packages
    from hpsearch.storage.urls import normalise_url
    from hpsearch.storage.web.token import TOKEN_VARIABLE

    require_server_packages()
    variable = "MLFLOW_BACKEND_STORE_URI"
    if not (given := os.environ.get(variable)):
        raise SearchError(f"environment variable {variable} is not set; set it to MLflow's Postgres URL")
    url = normalise_url(given, setting=variable)
    connect(url, application_name="hpsearch serve", setting=variable).close()
    _check_free(host, port)
    artifacts = _open_artifacts(artifacts)
    token = _read_web_token(no_auth=no_auth)
    hosts = allowed_hosts.split(",") if allowed_hosts else None
    command, environment = make_mlflow_command(host=host, port=port, artifacts=artifacts, allowed_hosts=hosts)
    environment |= {variable: url, TOKEN_VARIABLE: token or ""}
    with contextlib.suppress(OSError):  # MLflow opens lock files with predictable names in this folder
        environment["TMPDIR"] = str(open_private_folder("mlflow-tmp"))
    os.execve(command[0], command, {**os.environ, **environment})  # noqa: S606 becomes the service


def _open_artifacts(artifacts: str) -> str:
    """Create a local folder of artifacts and return its real path; return a URL as it is.

    A folder that other users can change or replace is rejected: they could let the server read and delete other files.
    """
    from hpsearch.search.errors import SearchError

    folder = Path(artifacts.removeprefix("file://")).absolute()
    if "://" in artifacts.removeprefix("file://"):
        return artifacts
    try:
        folder.mkdir(parents=True, exist_ok=True)  # otherwise another user could create it after this check
    except OSError as error:
        raise SearchError(
            f"--artifacts {artifacts!r} cannot be created ({error.strerror}); give another folder"
        ) from None
    if (part := find_changeable_part(folder, as_folder=True)) is not None:
        raise SearchError(
            f"--artifacts {artifacts!r}: other users can change or replace {str(part)!r}; give a folder that only you "
            "can change"
        )
    return str(folder.resolve())


def _check_free(host: str, port: int) -> None:
    from hpsearch.search.errors import SearchError
    from hpsearch.storage.sockets import bind_exclusively, close_all

    if not host:
        raise SearchError("--host '' is empty; give an address such as 127.0.0.1")
    try:
        close_all(bind_exclusively(host, port))
    except OSError as error:
        raise SearchError(
            f"--host {host} --port {port}: cannot listen ({error.strerror}); choose another address"
        ) from None


@_serve.command()
def dashboard(
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on")] = 8080,
    storage_url: Annotated[
        str | None,
        typer.Option(
            "--storage-url",
            envvar="HPSEARCH_STORAGE_URL",
            show_envvar=True,
            help="Postgres of the studies, postgresql://USER@HOST/DATABASE",
        ),
    ] = None,
    tracking_uri: o.TrackingUri = None,
    read_only: Annotated[
        bool,
        typer.Option(
            "--read-only",
            envvar="HPSEARCH_DASHBOARD_READ_ONLY",
            show_envvar=True,
            help="Reject requests that delete, rename or annotate studies",
        ),
    ] = False,
    no_auth: NoAuth = False,
) -> None:
    """Run the Optuna dashboard with artifacts from MLflow.

    Browsers need HPSEARCH_WEB_TOKEN of this process, once in the link http://HOST:PORT/?token=TOKEN.
    With a tracking server, the dashboard also records promotions that users make in the MLflow UI.
    """
    from hpsearch.search.errors import SearchError
    from hpsearch.search.promotion.registry_watch import serve_dashboard_and_watch
    from hpsearch.storage.embedded.services import require_server_packages
    from hpsearch.storage.urls import normalise_url

    require_server_packages()
    if storage_url is None:
        raise SearchError("--storage-url is missing; give the database's URL, or set HPSEARCH_STORAGE_URL")
    normalise_url(storage_url)
    _check_free(host, port)
    token = _read_web_token(no_auth=no_auth)
    serve_dashboard_and_watch(storage_url, tracking_uri, host=host, port=port, read_only=read_only, token=token)


@_serve.command()
def metrics(
    *,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on")] = 9464,
    storage_url: o.StorageUrl = None,
    no_auth: NoAuth = False,
    home: o.Home = None,
) -> None:
    """Serve metrics of all studies for Prometheus.

    The page http://HOST:PORT/metrics has workers, trials, epochs, attempts and best values. Prometheus needs the token
    in authorization.credentials_file: HPSEARCH_WEB_TOKEN of this process, or for the embedded services the file
    metrics-token of the home folder, which this command creates.
    """
    from hpsearch.search.services import find_services
    from hpsearch.storage.embedded.services import require_server_packages
    from hpsearch.storage.web.token import METRICS_TOKEN_FILE, TOKEN_VARIABLE, load_or_create_token

    require_server_packages(("prometheus-client", "waitress"))
    from hpsearch.storage.metrics import serve_metrics  # imports a package of the extra `server`

    _check_free(host, port)
    services = find_services({"storage_url": storage_url, "home": home})
    if services.is_embedded and not no_auth and not os.environ.get(TOKEN_VARIABLE):
        token: str | None = load_or_create_token(services.home, METRICS_TOKEN_FILE)
    else:
        token = _read_web_token(no_auth=no_auth, warning=_NO_AUTH_METRICS_WARNING)
    serve_metrics(services.storage_url, host=host, port=port, token=token)
