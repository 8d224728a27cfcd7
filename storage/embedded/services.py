"""The embedded services: Postgres, MLflow and the dashboard, and their command lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from hpsearch.storage.database import roles
from hpsearch.storage.database.connect import answers
from hpsearch.storage.database.schema import IS_CURRENT
from hpsearch.storage.embedded import state as ports
from hpsearch.storage.embedded.postgres import Server, database_url
from hpsearch.storage.embedded.postgres_account import find_folder, make_folder
from hpsearch.storage.embedded.state import State
from hpsearch.storage.embedded.web_service import WebService
from hpsearch.storage.errors import StorageError
from hpsearch.storage.home import private_folder


def require_server_packages() -> None:
    """Check that the packages of the extra `server` are installed; Postgres may also be the system's.

    Raises:
        StorageError: One of them is missing.
    """
    for name in ("mlflow", "waitress"):  # workers have mlflow-skinny, which contains most of the module mlflow
        try:
            distribution(name)
        except PackageNotFoundError:
            raise StorageError(
                f"the package {name} is not installed, which the services need: pip install 'hpsearch[server]', "
                "or use services that run elsewhere: --storage-url and --tracking-uri"
            ) from None


def mlflow_command(
    *, host: str, port: int, artifacts: str, allowed_hosts: Sequence[str] | None
) -> tuple[list[str], dict[str, str]]:
    """Return the command of the MLflow server and the variables to add to its environment.

    One process serves the requests: it starts in half the time of the four that MLflow would use, in a quarter of the
    memory, and answers small requests faster. The job runner, which evaluates language models, stays off.

    Args:
        host: Address to listen on.
        port: Port to listen on.
        artifacts: Folder or URL where artifacts are kept; clients reach them through the server.
        allowed_hosts: Host headers the server answers to, port included ("mlflow:5000"); None for MLflow's default,
            which is this machine and private addresses.
    """
    command = [sys.executable, "-P", "-m", "mlflow", "server", "--host", host, "--port", str(port), "--workers", "1"]
    command += ["--artifacts-destination", artifacts]
    # One line a request would be gigabytes in a long search.
    command += ["--uvicorn-opts", "--no-access-log"]
    if allowed_hosts:
        command += ["--allowed-hosts", ",".join(allowed_hosts)]
    return command, {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}


Progress = Callable[[str], None]


@dataclass(frozen=True)
class StackInfo:
    """Where the services of a stack are; the two database URLs hold passwords.

    Attributes:
        home: The folder of the stack.
        storage_url: The study database for workers, who may read and write rows.
        owner_url: The same for migrations.
        tracking_uri: The MLflow server.
        dashboard_url: The Optuna dashboard, without a path.
    """

    home: Path
    storage_url: str
    owner_url: str
    tracking_uri: str
    dashboard_url: str


class EmbeddedStack:
    """Postgres, an MLflow server on it, and the Optuna dashboard.

    Starting and stopping take the stack's lock, which the callers in `hpsearch.storage.embedded.stack` hold.

    Args:
        home: folder of the stack.
        state: its stored state.
        dashboard: command of the dashboard, without `--host` and `--port`; only `start` needs it.
    """

    def __init__(self, home: Path, state: State, dashboard: Sequence[str] = ()) -> None:
        self.home = home
        self.state = state
        self._dashboard = dashboard
        self._logs = home / "logs"
        service = partial(WebService, save=self._save, home=home)
        self.mlflow = service(
            name="MLflow",
            health_path="/api/2.0/mlflow/experiments/search?max_results=1",  # goes to the database and back
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
    def server(self) -> Server | None:
        """The Postgres, once it has a data directory."""
        folder = find_folder(self.home)
        return Server(folder, self._logs / "postgres.log") if folder else None

    @property
    def info(self) -> StackInfo:
        """Where the services are, or were when they ran last."""
        return StackInfo(
            home=self.home,
            storage_url=self._url(roles.WORKER, self.state.worker_password, roles.STUDIES),
            owner_url=self._url(roles.OWNER, self.state.owner_password, roles.STUDIES),
            tracking_uri=self.mlflow.url,
            dashboard_url=self.dashboard.url,
        )

    @property
    def databases(self) -> roles.Databases:
        """The databases, one URL for each role."""
        tracking = self._url(roles.MLFLOW, self.state.mlflow_password, roles.TRACKING)
        return roles.Databases(self.info.owner_url, self.info.storage_url, tracking)

    def postgres_answers(self, question: str = "SELECT true") -> bool:
        """Whether our Postgres runs where it is remembered, lets a worker in, and says yes to `question`."""
        server, port = self.server, self.state.postgres.port
        if server is None or port is None or server.running() is None or server.port() != port:
            return False
        return answers(self.info.storage_url, question)

    def is_up(self) -> bool:
        """Whether all three run and answer, and the tables are of this release."""
        return (
            self.postgres_answers(IS_CURRENT)
            and self.mlflow.find() is not None
            and self.dashboard.find() is not None
            and self.dashboard.answers()
            and self.mlflow.answers()
        )

    def start(self, progress: Progress) -> None:
        """Adopt what runs and start what does not."""
        port = self.start_postgres(progress)
        if not self.mlflow.find():
            progress("starting MLflow (about 10 s)")
        self.mlflow.begin(port)
        # MLflow takes longest: the study tables and the dashboard are made meanwhile.
        from hpsearch.storage.database.migrate import migrate

        migrate(self.info.owner_url, setting="the embedded Postgres")
        if not self.dashboard.find():
            progress("starting the Optuna dashboard")
        self.dashboard.begin(port, self.mlflow.record.port)
        self.mlflow.finish()
        self.dashboard.begin(port, self.mlflow.record.port)  # nothing, unless MLflow had to take another port
        self.dashboard.finish()

    def stop_services(self) -> list[tuple[str, int | None]]:
        """Stop the users of Postgres; return each with its process, None for one that did not run."""
        return [(service.name, service.stop()) for service in (self.dashboard, self.mlflow)]

    def stop(self) -> list[str]:
        """Stop everything, the users of Postgres first; return what was stopped."""
        server = self.server
        stopped = self.stop_services()
        stopped.append(("Postgres", server.stop() if server else None))
        self.state.postgres.process = None
        self._save()
        return [f"{name} (process {pid})" for name, pid in stopped if pid is not None]

    def start_postgres(self, progress: Progress) -> int:
        """Adopt Postgres if it runs, else start it, set up where there is none yet; return its port."""
        server = Server(make_folder(self.home), self._logs / "postgres.log")
        self.state.postgres_folder = str(server.folder)
        if not server.folder.is_relative_to(self.home):
            progress(f"Postgres cannot run as root, and as another user cannot enter {self.home}")
            progress(f"its data is in {server.folder}")
        port = server.adopt()
        if port is None:
            progress("starting Postgres" if server.data.exists() else "setting up Postgres")
            port = server.start(self.state.postgres.port)
        self.state.postgres.port = port
        self.state.postgres.process = server.identity()
        self._save()
        roles.create_databases(
            server.url(port),
            owner_password=self.state.owner_password,
            worker_password=self.state.worker_password,
            mlflow_password=self.state.mlflow_password,
            setting="the embedded Postgres",
        )
        return port

    def _save(self) -> None:
        self.state.save(self.home)

    def _url(self, role: str, password: str, database: str, *, application_name: str = "") -> str:
        port = self.state.postgres.port
        assert port is not None
        return database_url(role, password, port, database, application_name=application_name)

    def _mlflow_command(self, port: int) -> tuple[list[str], dict[str, str]]:
        artifacts = private_folder(self.home / "artifacts").as_uri()
        command, env = mlflow_command(host=ports.LOOPBACK, port=port, artifacts=artifacts, allowed_hosts=None)
        password = self.state.mlflow_password
        backend = self._url(roles.MLFLOW, password, roles.TRACKING, application_name="hpsearch-mlflow")
        return command, env | {"MLFLOW_BACKEND_STORE_URI": backend}

    def _dashboard_command(self, port: int) -> tuple[list[str], dict[str, str]]:
        command = [*self._dashboard, "--host", ports.LOOPBACK, "--port", str(port)]
        return command, {"HPSEARCH_STORAGE_URL": self.info.storage_url, "HPSEARCH_TRACKING_URI": self.mlflow.url}
