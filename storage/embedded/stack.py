"""The embedded stack of a home folder: up, down, status.

Its services outlive the command that started them. Any command may start it, find it, or stop it; a lock in the home
folder keeps two from doing so at once, and `stack.json` there says where things are.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from hpsearch.storage.database.roles import Databases
from hpsearch.storage.embedded import state as ports
from hpsearch.storage.embedded.services import EmbeddedStack, Progress, StackInfo, require_server_packages
from hpsearch.storage.embedded.state import FILE, State, load
from hpsearch.storage.embedded.web_service import START_TIMEOUT, WebService
from hpsearch.storage.errors import StorageError
from hpsearch.storage.home import VARIABLE, check_writable, home_dir, private_folder

__all__ = ["Progress", "ServiceStatus", "StackInfo", "databases", "down", "held", "info", "status", "up"]

_LOCK_TIMEOUT = 900.0  # seconds


@dataclass
class ServiceStatus:
    """How one service is.

    "starting" means that it does not answer yet, "dead" that it ended, or does not answer, without having been stopped.
    """

    name: str
    state: Literal["running", "starting", "stopped", "dead"]
    url: str | None
    pid: int | None
    detail: str


def up(home: Path, *, dashboard: Sequence[str], progress: Progress = lambda _: None) -> StackInfo:
    """Start what does not run of the stack in `home`, adopt what does, and return where it is.

    Args:
        home: The folder of the stack, see `hpsearch.storage.home.home_dir`; created where it is missing.
        dashboard: The command of the dashboard, without `--host` and `--port`.
        progress: Is told what is being done, a line at a time.

    Raises:
        StorageError: The folder cannot be used, or a service cannot be started.
    """
    if running := info(home):
        return running
    require_server_packages()
    home = home_dir(str(home)).resolve()
    with _locked(home, progress):
        private_folder(home / "logs")
        stack = EmbeddedStack(home, load(home) or State(), dashboard)
        if not stack.is_up():  # else somebody else has just started it
            stack.start(progress)
        return stack.info


def databases(home: Path) -> Databases:
    """Return the databases of the stack in `home`, which was started before.

    Raises:
        StorageError: there is none.
    """
    if (state := _readable_state(home.resolve())) is None or state.postgres.port is None:
        raise StorageError(f"{VARIABLE} {str(home)!r} holds no services: set it to the folder of those that you mean")
    return EmbeddedStack(home.resolve(), state).databases


@contextmanager
def held(home: Path, *, progress: Progress = lambda _: None) -> Iterator[EmbeddedStack]:
    """Hold the stack in `home` with its Postgres running, for what is to have the databases to itself.

    Nobody starts or stops a service meanwhile; what is inside may stop them. `up` has it all run again.

    Raises:
        StorageError: The folder cannot be used, or Postgres cannot be started.
    """
    require_server_packages()
    home = home_dir(str(home)).resolve()
    with _locked(home, progress):
        private_folder(home / "logs")
        stack = EmbeddedStack(home, load(home) or State())
        stack.start_postgres(progress)
        yield stack


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
        return EmbeddedStack(home, load(home) or State()).stop()


def info(home: Path) -> StackInfo | None:
    """Return where the stack in `home` is if all its services answer; starts nothing."""
    home = home.resolve()
    state = _readable_state(home)
    if state is None:
        return None
    stack = EmbeddedStack(home, state)
    return stack.info if stack.is_up() else None


def status(home: Path) -> list[ServiceStatus]:
    """Return how the services of the stack in `home` are; starts nothing."""
    home = home.resolve()
    stack = EmbeddedStack(home, _readable_state(home) or State())
    return [_postgres_status(stack), _web_status(stack.mlflow), _web_status(stack.dashboard)]


def _postgres_status(stack: EmbeddedStack) -> ServiceStatus:
    record, server = stack.state.postgres, stack.server
    if server is None:
        return ServiceStatus("Postgres", "stopped", None, None, "not set up yet")
    url = f"postgresql://{ports.LOOPBACK}:{record.port}" if record.port else None
    process = server.running()
    if process is None and record.process is None:
        return ServiceStatus("Postgres", "stopped", url, None, f"data in {server.data}")
    if process is None:
        return ServiceStatus("Postgres", "dead", url, None, f"it ended by itself: see {server.log}")
    if not stack.postgres_answers():
        return _silent("Postgres", url, process, server.log, starting=_is_young(process))
    return ServiceStatus("Postgres", "running", url, process.pid, f"data in {server.data}")


def _web_status(service: WebService) -> ServiceStatus:
    url = service.url if service.record.port else None
    process = service.find()
    if process is None and service.record.process is None:
        return ServiceStatus(service.name, "stopped", url, None, "")
    if process is None:
        return ServiceStatus(service.name, "dead", url, None, f"it ended by itself: see {service.log}")
    if not service.answers():
        starting = _is_young(process) and not service.listens()
        return _silent(service.name, url, process, service.log, starting=starting)
    return ServiceStatus(service.name, "running", url, process.pid, f"log in {service.log}")


def _is_young(process: psutil.Process) -> bool:
    return time.time() - process.create_time() < START_TIMEOUT


def _silent(name: str, url: str | None, process: psutil.Process, log: Path, *, starting: bool) -> ServiceStatus:
    """Return how a service is that runs and does not answer."""
    if starting:
        return ServiceStatus(name, "starting", url, process.pid, f"it does not answer yet: log in {log}")
    return ServiceStatus(name, "dead", url, process.pid, f"it does not answer: see {log}")


def _readable_state(home: Path) -> State | None:
    try:
        return load(home)
    except OSError as error:
        raise StorageError(
            f"{VARIABLE} {str(home)!r} cannot be read ({error.strerror}): set it to a folder of yours"
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
            lock.acquire(timeout=_LOCK_TIMEOUT)
    except filelock.Timeout:
        raise StorageError(
            f"another hpsearch command has held {str(home / 'stack.lock')!r} for {_LOCK_TIMEOUT / 60:.0f} minutes: "
            "end it and try again"
        ) from None
    except (OSError, NotImplementedError) as error:
        raise StorageError(
            f"{VARIABLE} {str(home)!r} cannot be locked ({error}): set it to a folder on a local disk"
        ) from None
    try:
        yield
    except OSError as error:  # the disk is full, somebody removed the folder, ...
        raise StorageError(
            f"{VARIABLE} {str(home)!r} cannot be used ({error}): mend that, or set it to another folder"
        ) from error
    finally:
        lock.release()
