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
from hpsearch.storage.embedded.state import FILE, ServiceRecord, State, load
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
    with _locked(home_dir(str(home)), progress, dashboard) as stack:
        if not stack.is_up():  # else somebody else has just started it
            stack.start(progress)
        return stack.info


def databases(home: Path) -> Databases:
    """Return the databases of the stack in `home`, which was started before.

    Raises:
        StorageError: there is none.
    """
    if (stack := _stored(home)) is None or stack.state.postgres.port is None:
        raise StorageError(f"{VARIABLE} {str(home)!r} holds no services: set it to the folder of those that you mean")
    return stack.databases


@contextmanager
def held(home: Path, *, progress: Progress = lambda _: None) -> Iterator[EmbeddedStack]:
    """Hold the stack in `home` with its Postgres running, for what is to have the databases to itself.

    Nobody starts or stops a service meanwhile; what is inside may stop them. `up` has it all run again.

    Raises:
        StorageError: The folder cannot be used, or Postgres cannot be started.
    """
    require_server_packages()
    with _locked(home_dir(str(home)), progress) as stack:
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
    with _locked(home) as stack:
        return stack.stop()


def info(home: Path) -> StackInfo | None:
    """Return where the stack in `home` is if all its services answer; starts nothing."""
    stack = _stored(home)
    return stack.info if stack is not None and stack.is_up() else None


def status(home: Path) -> list[ServiceStatus]:
    """Return how the services of the stack in `home` are; starts nothing."""
    stack = _stored(home) or EmbeddedStack(home.resolve(), State())
    return [_postgres_status(stack), _web_status(stack.mlflow), _web_status(stack.dashboard)]


def _postgres_status(stack: EmbeddedStack) -> ServiceStatus:
    if (server := stack.server) is None:
        return ServiceStatus("Postgres", "stopped", None, None, "not set up yet")
    record, detail = stack.state.postgres, f"data in {server.data}"
    url = f"postgresql://{ports.LOOPBACK}:{record.port}" if record.port else None
    if (process := server.running()) is None:
        return _not_running("Postgres", url, record, server.log, detail)
    if not stack.postgres_answers():
        return _silent("Postgres", url, process, server.log)
    return ServiceStatus("Postgres", "running", url, process.pid, detail)


def _web_status(service: WebService) -> ServiceStatus:
    url = service.url if service.record.port else None
    if (process := service.find()) is None:
        return _not_running(service.name, url, service.record, service.log, "")
    if not service.answers():
        return _silent(service.name, url, process, service.log, hangs=service.listens())
    return ServiceStatus(service.name, "running", url, process.pid, f"log in {service.log}")


def _not_running(name: str, url: str | None, record: ServiceRecord, log: Path, detail: str) -> ServiceStatus:
    if record.process is None:
        return ServiceStatus(name, "stopped", url, None, detail)
    return ServiceStatus(name, "dead", url, None, f"it ended by itself: see {log}")


def _silent(name: str, url: str | None, process: psutil.Process, log: Path, *, hangs: bool = False) -> ServiceStatus:
    """Return the status of a service that runs and does not answer."""
    if not hangs and time.time() - process.create_time() < START_TIMEOUT:
        return ServiceStatus(name, "starting", url, process.pid, f"it does not answer yet: log in {log}")
    return ServiceStatus(name, "dead", url, process.pid, f"it does not answer: see {log}")


def _stored(home: Path) -> EmbeddedStack | None:
    """Return the stack in `home` as its state file describes it; None where there is no readable one."""
    home = home.resolve()
    try:
        state = load(home)
    except OSError as error:
        raise StorageError(
            f"{VARIABLE} {str(home)!r} cannot be read ({error.strerror}): set it to a folder of yours"
        ) from None
    return None if state is None else EmbeddedStack(home, state)


@contextmanager
def _locked(home: Path, progress: Progress = lambda _: None, dashboard: Sequence[str] = ()) -> Iterator[EmbeddedStack]:
    """Hold the lock of the stack and yield it; the process that has the lock may be starting it, which takes time."""
    import filelock

    home = home.resolve()
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
        private_folder(home / "logs")
        yield EmbeddedStack(home, load(home) or State(), dashboard)
    except OSError as error:  # the disk is full, somebody removed the folder, ...
        raise StorageError(
            f"{VARIABLE} {str(home)!r} cannot be used ({error}): mend that, or set it to another folder"
        ) from error
    finally:
        lock.release()
