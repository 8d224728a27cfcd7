"""The embedded services Postgres, MLflow and dashboard, and their command lines."""

from __future__ import annotations

import os
import shlex
import sys
import sysconfig
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from hpsearch.storage.database import roles
from hpsearch.storage.database.connect import find_database_error, open_cursor
from hpsearch.storage.database.mlflow_links import replace_address
from hpsearch.storage.database.schema import CURRENT_SCHEMA_QUERY
from hpsearch.storage.embedded.postgres import EmbeddedPostgres, make_database_url
from hpsearch.storage.embedded.postgres_account import find_postgres_folder, make_postgres_folder
from hpsearch.storage.embedded.state import StackState
from hpsearch.storage.embedded.web_service import WebService
from hpsearch.storage.errors import StorageError
from hpsearch.storage.home import HOME_VARIABLE
from hpsearch.storage.sockets import LOOPBACK
from hpsearch.storage.web.token import AUTH_NAME, TOKEN_VARIABLE, load_or_create_token


def require_server_packages(names: Sequence[str] = ("mlflow", "waitress")) -> None:
    """Check that packages of the pip extra `server` are installed.

    Raises:
        StorageError: a package is missing.
    """
    # Workers have mlflow-skinny, which contains most of the module mlflow.
    for name in names:
        try:
            distribution(name)
        except PackageNotFoundError:
            raise StorageError(
                f"the package {name} of the embedded services is not installed; pip install 'hpsearch[server]', "
                "or give --storage-url and --tracking-uri of other services"
            ) from None


_LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")


def make_mlflow_command(
    *, host: str, port: int, artifacts: str, allowed_hosts: Sequence[str] | None
) -> tuple[list[str], dict[str, str]]:
    """Return the command line of the MLflow server, and its additional environment variables.

    One process serves all requests. MLflow's default is four processes, which need twice the time to start and four
    times the memory, and answer small requests more slowly. MLflow's job runner for language models is disabled.

    Args:
        host: address to listen on.
        port: port to listen on.
        artifacts: folder or URL of the artifacts; clients access them through the server.
        allowed_hosts: accepted values of the Host header, with port ("mlflow:5000"). None accepts only this machine if
            `host` is a loopback address, and otherwise MLflow's default, which also accepts private addresses.
    """
    if allowed_hosts is None and host in _LOOPBACK_HOSTS:  # a web page can have a host name that begins with 10.
        allowed_hosts = [f"{name}{port}" for name in ("localhost", "127.0.0.1", "[[]::1[]]") for port in ("", ":*")]
    command = [sys.executable, "-P", "-m", "mlflow", "server", "--host", host, "--port", str(port), "--workers", "1"]
    command += ["--artifacts-destination", artifacts, "--app-name", "hpsearch"]  # storage/mlflow/server.py
    # One log line per request would be gigabytes in a long search.
    # Without a folder of the application, the server would import modules of the working folder first.
    trusted = shlex.quote(sysconfig.get_path("purelib"))
    command += ["--uvicorn-opts", f"--no-access-log --app-dir {trusted}"]
    if allowed_hosts:
        command += ["--allowed-hosts", ",".join(allowed_hosts)]
    disabled = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_ENABLE_WORKSPACES": "false"}
    return command, {**disabled, "MLFLOW_DISABLE_TELEMETRY": "true", "PYTHONSAFEPATH": "1"}


OnProgress = Callable[[str], None]


@dataclass(frozen=True)
class StackInfo:
    """Addresses of the services of a stack; the two database URLs contain passwords.

    Attributes:
        home: folder of the stack.
        storage_url: URL of the study database for the worker role.
        owner_url: URL of the study database for the owner role, for migrations.
        tracking_uri: URL of the MLflow server.
        dashboard_url: URL of the Optuna dashboard, without a path.
    """

    home: Path
    storage_url: str
    owner_url: str
    tracking_uri: str
    dashboard_url: str


class EmbeddedStack:
    """Postgres, MLflow server and Optuna dashboard of a home folder.

    Callers in `hpsearch.storage.embedded.stack` hold the lock of the stack while they start or stop services.

    Args:
        home: folder of the stack.
        state: stored state of the stack.
        dashboard: command line of the dashboard, without `--host` and `--port`; only `start` uses it.
    """

    def __init__(self, home: Path, state: StackState, dashboard: Sequence[str] = ()) -> None:
        self.home = home
        self.state = state
        self._dashboard = dashboard
        self._logs = home / "logs"
        service = partial(WebService, save_state=self._save, home=home, token=self._find_token)
        self.mlflow = service(
            name="MLflow",
            health_path="/api/2.0/mlflow/experiments/search?max_results=1",  # includes a query of the database
            command=self._mlflow_command,
            record=state.mlflow,
            log=self._logs / "mlflow.log",
        )
        self.dashboard = service(
            name="Optuna dashboard",
            health_path="/api/meta",
            command=self._dashboard_command,
            record=state.dashboard,
            log=self._logs / "dashboard.log",
        )

    @property
    def server(self) -> EmbeddedPostgres | None:
        """Postgres server; None if it has no data directory yet."""
        folder = find_postgres_folder(self.home)
        return EmbeddedPostgres(folder, self._logs / "postgres.log") if folder else None

    @property
    def info(self) -> StackInfo:
        """Current or last addresses of the services."""
        return StackInfo(
            home=self.home,
            storage_url=self._url(roles.WORKER, self.state.worker_password, roles.STUDY_DATABASE),
            owner_url=self._url(roles.OWNER, self.state.owner_password, roles.STUDY_DATABASE),
            tracking_uri=self.mlflow.url,
            dashboard_url=self.dashboard.url,
        )

    @property
    def databases(self) -> roles.Databases:
        """Database URLs, one per role."""
        tracking = self._url(roles.MLFLOW, self.state.mlflow_password, roles.MLFLOW_DATABASE)
        return roles.Databases(self.info.owner_url, self.info.storage_url, tracking)

    def find_postgres_error(
        self, query: str = "SELECT true", *, connect_seconds: int | None = None
    ) -> Exception | None:
        """Return why Postgres does not run on its stored port, accept the worker role and return true for `query`."""
        server, port = self.server, self.state.postgres.port
        if server is None or port is None or server.find_process() is None or server.read_port() != port:
            return StorageError("Postgres does not run on its stored port")
        return find_database_error(self.info.storage_url, query, connect_seconds=connect_seconds)

    def is_up(self, *, connect_seconds: int | None = None) -> bool:
        """Return whether all services are healthy, and the tables have the revisions of this version of hpsearch.

        Args:
            connect_seconds: timeout of the connection to Postgres; None for the usual one.
        """
        return (
            self.find_postgres_error(CURRENT_SCHEMA_QUERY, connect_seconds=connect_seconds) is None
            and self.mlflow.has_current_token()
            and self.dashboard.has_current_token()
            and self.mlflow.record.is_of(self.home)
            and self.dashboard.record.is_of(self.home)
            and self.mlflow.find() is not None
            and self.dashboard.find() is not None
            and self.dashboard.is_healthy()
            and self.mlflow.is_healthy()
        )

    def start(self, progress: OnProgress) -> None:
        """Start the services that do not run, and wait until all are healthy."""
        port = self.start_postgres(progress)
        if not self.mlflow.find():
            progress("starting MLflow (about 10 s)")
        self.mlflow.ensure_started(port)
        # MLflow needs the most time to start, so the study tables and the dashboard are prepared at the same time.
        from hpsearch.storage.database.migrate import migrate

        migrate(self.info.owner_url, setting="the embedded Postgres")
        if not self.dashboard.find():
            progress("starting the Optuna dashboard")
        self.dashboard.ensure_started(port, self.mlflow.record.port)
        self.mlflow.wait_until_healthy(progress)
        self.dashboard.ensure_started(port, self.mlflow.record.port)  # restarts only if MLflow changed its port
        self.dashboard.wait_until_healthy(progress)
        self._update_links()

    def revive(self) -> None:
        """Restart dead services, Postgres first; a restarted web service needs time until it answers.

        If Postgres is dead, only Postgres is restarted, because the other services may work as soon as it answers.
        """
        port = self.state.postgres.port
        if port is None or self.find_postgres_error() is not None:
            self.start_postgres(lambda _: None)
            return
        for service in (self.mlflow, self.dashboard):
            is_running = service.find() is not None
            service.ensure_started(port, self.mlflow.record.port if service is self.dashboard else None)
            if is_running and not service.is_healthy():
                service.wait_until_healthy()  # restarts a service that hangs

    def stop_services(self) -> list[tuple[str, int | None]]:
        """Stop the services that use Postgres; return (name, process id) of each, with None if it did not run."""
        return [(service.name, service.stop()) for service in (self.dashboard, self.mlflow)]

    def stop(self) -> list[str]:
        """Stop all services, Postgres last; return one line per stopped service."""
        server = self.server
        # Saved first, because a search restarts services that end without a stop command.
        records = (self.state.postgres, self.state.mlflow, self.state.dashboard)
        known = [record.process for record in records]
        for record in records:
            record.process = None
        with suppress(OSError):  # a full disk must not keep the services running
            self._save()
        for record, process in zip(records, known, strict=True):
            record.process = process
        stopped = self.stop_services()
        stopped.append(("Postgres", server.stop() if server else None))
        self.state.postgres.process = None
        with suppress(OSError):
            self._save()
        return [f"{name} (process {pid})" for name, pid in stopped if pid is not None]

    def start_postgres(self, progress: OnProgress) -> int:
        """Start Postgres unless it runs, and return its port; missing data directory and databases are created."""
        self._check_data_folder()
        server = EmbeddedPostgres(make_postgres_folder(self.home), self._logs / "postgres.log")
        self.state.postgres_folder = str(server.folder)
        if not server.folder.is_relative_to(self.home):
            progress(f"Postgres runs as another user than root, and that user cannot access {self.home}")
            progress(f"the data of Postgres is therefore in {server.folder}")
        if (port := server.attach(progress)) is None:
            progress("starting Postgres" if server.data_folder.exists() else "setting up Postgres")
            port = server.start(self.state.postgres.port, progress)
        self.state.postgres.port = port
        self.state.postgres.process = server.read_identity()
        self.state.postgres.home = str(self.home)
        self._save()
        roles.create_databases(
            server.make_url(port),
            owner_password=self.state.owner_password,
            worker_password=self.state.worker_password,
            mlflow_password=self.state.mlflow_password,
            setting="the embedded Postgres",
        )
        with open_cursor(server.make_url(port), application_name="hpsearch-bootstrap") as cursor:
            # A worker could fill the disk there, and its session would block the creation of databases.
            cursor.execute("REVOKE CONNECT, TEMPORARY ON DATABASE postgres, template1 FROM PUBLIC")
        return port

    def _check_data_folder(self) -> None:
        """Check that a moved or copied home has its data, which root's Postgres may have outside of the home.

        Raises:
            StorageError: the data are elsewhere.
        """
        former = self.state.postgres_folder
        if former is None or find_postgres_folder(self.home) is not None or not Path(former, "data").exists():
            return
        raise StorageError(
            f"{HOME_VARIABLE} {str(self.home)!r} was moved or copied without its database in {former!r}; move the home "
            "back, and use hpsearch backup and restore"
        )

    def _update_links(self) -> None:
        """Write the current address of MLflow to the stored links if MLflow has got another port."""
        port, former = self.mlflow.record.port, self.state.linked_port
        if former == port:
            return
        if former is not None:
            old = f"http://{LOOPBACK}:{former}"
            replace_address(self.databases, old, self.mlflow.url, setting="the embedded Postgres")
        self.state.linked_port = port
        self._save()

    def _find_token(self) -> str | None:
        return load_or_create_token(self.home) if self.state.needs_token else None

    def _save(self) -> None:
        self.state.save(self.home)

    def _url(self, role: str, password: str, database: str, *, application_name: str = "") -> str:
        port = self.state.postgres.port
        assert port is not None
        host, uid = (server.get_host(port), server.uid) if (server := self.server) else (LOOPBACK, os.geteuid())
        return make_database_url(role, password, host, port, database, uid=uid, application_name=application_name)

    def _mlflow_command(self, port: int) -> tuple[list[str], dict[str, str]]:
        # Relative to the home, which is the working directory: MLflow decodes a "%20" in an absolute path.
        command, env = make_mlflow_command(host=LOOPBACK, port=port, artifacts="artifacts", allowed_hosts=None)
        password = self.state.mlflow_password
        backend = self._url(roles.MLFLOW, password, roles.MLFLOW_DATABASE, application_name="hpsearch-mlflow")
        env |= {"MLFLOW_BACKEND_STORE_URI": backend, TOKEN_VARIABLE: self._find_token() or ""}
        # MLflow opens lock files with predictable names there.
        return command, env | {"TMPDIR": str(self.home / "mlflow-tmp")}

    def _dashboard_command(self, port: int) -> tuple[list[str], dict[str, str]]:
        command = [*self._dashboard, "--host", LOOPBACK, "--port", str(port)]
        env = {"HPSEARCH_STORAGE_URL": self.info.storage_url, "HPSEARCH_TRACKING_URI": self.mlflow.url}
        if (token := self._find_token()) is None:
            return [*command, "--no-auth"], env
        # MLflow's client finds the token in the home, and sends it only to a process of this user.
        return command, env | {HOME_VARIABLE: str(self.home), "MLFLOW_TRACKING_AUTH": AUTH_NAME, TOKEN_VARIABLE: token}
