"""The embedded stack of a home folder: up, down, status.

The services outlive the command that started them. Any command may start, find or stop them; a lock in the home folder
serializes these commands, and `stack.json` there holds the state.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from hpsearch.storage.database.connect import format_rejection_reason
from hpsearch.storage.database.roles import Databases
from hpsearch.storage.embedded.postgres import QUICK_CONNECT_SECONDS
from hpsearch.storage.embedded.services import EmbeddedStack, OnProgress, StackInfo, require_server_packages
from hpsearch.storage.embedded.state import ServiceRecord, StackState, load_state
from hpsearch.storage.embedded.web_service import START_TIMEOUT, WebService
from hpsearch.storage.errors import StorageError, suggest_disk_remedy
from hpsearch.storage.home import HOME_VARIABLE, STATE_FILE, check_writable, prepare_home, remember_home
from hpsearch.storage.web.token import AUTH_NAME

__all__ = ["OnProgress", "ServiceStatus", "StackInfo", "down", "find_running", "lock", "read_status", "read_urls", "up"]

_LOCK_FILE = "stack.lock"
_LOCK_TIMEOUT = 900.0  # seconds


@dataclass
class ServiceStatus:
    """Status of one service.

    Attributes:
        name: name of the service.
        state: "running" (it answers), "starting" (it runs and does not answer yet), "stopped" (by a command), or "dead"
            (it ended without a stop command, or hangs).
        url: address of the service; None if unknown.
        pid: process id of the service; None if it does not run.
        detail: further information for users.
    """

    name: str
    state: Literal["running", "starting", "stopped", "dead"]
    url: str | None
    pid: int | None
    detail: str


def up(
    home: Path,
    *,
    dashboard: Sequence[str],
    needs_token: bool | None = None,
    progress: OnProgress = lambda _: None,
) -> StackInfo:
    """Start the services in `home` that do not run, and return the addresses of all services.

    Args:
        home: home folder of the stack, see `hpsearch.storage.home.prepare_home`; created if it is missing.
        dashboard: command line of the dashboard, without `--host` and `--port`.
        needs_token: whether MLflow and the dashboard accept only requests with the token of the installation; None
            keeps the stored choice, which is True for a new stack.
        progress: callback for progress lines.

    Raises:
        StorageError: the folder cannot be used, or a service cannot be started.
    """
    home = prepare_home(str(home))
    _send_token(home)
    if needs_token is None and (running := find_running(home, connect_seconds=QUICK_CONNECT_SECONDS)):
        return running
    require_server_packages()
    with _lock_stack(home, progress, dashboard) as stack:
        if needs_token is not None:
            stack.state.needs_token = needs_token
        if not stack.is_up(
            connect_seconds=QUICK_CONNECT_SECONDS
        ):  # another command may have started the stack while this one waited for the lock
            stack.start(progress)
        return stack.info


def revive(home: Path, *, dashboard: Sequence[str]) -> None:
    """Restart the dead services of an existing stack, each by itself: a web service does not delay Postgres.

    Args:
        home: home folder of the stack.
        dashboard: as for `up`.

    Raises:
        StorageError: the folder cannot be used, or a service cannot be started.
    """
    with _lock_stack(home, dashboard=dashboard) as stack:
        stack.revive()


def read_urls(home: Path) -> Databases:
    """Return the database URLs of an existing stack.

    Raises:
        StorageError: there is no stack in `home`.
    """
    if (stack := _load_stack(home)) is None or stack.state.postgres.port is None:
        raise StorageError(f"{HOME_VARIABLE} {str(home)!r} contains no embedded services; set another folder")
    return stack.databases


@contextmanager
def lock(home: Path, *, progress: OnProgress = lambda _: None) -> Iterator[EmbeddedStack]:
    """Lock the stack in `home` for exclusive use of its databases, start Postgres if necessary, and yield the stack.

    No other command can start or stop services while the lock is held. The caller may stop services; `up` starts them
    again.

    Raises:
        StorageError: the folder cannot be used, or Postgres cannot be started.
    """
    require_server_packages()
    with _lock_stack(prepare_home(str(home)), progress) as stack:
        stack.start_postgres(progress)
        yield stack


def down(home: Path) -> list[str]:
    """Stop the stack in `home`; nothing is deleted.

    Returns:
        One line per stopped service; empty if none was running.

    Raises:
        StorageError: the folder belongs to another user.
    """
    home = home.resolve()
    if not home.is_dir():
        return []
    check_writable(home)
    if not (home / STATE_FILE).exists() and not (home / _LOCK_FILE).exists():
        return []  # no command has created a stack
    with _lock_stack(home) as stack:
        return stack.stop()


def find_running(home: Path, *, connect_seconds: int | None = None) -> StackInfo | None:
    """Return the addresses of the stack in `home` if all its services are healthy, else None; start no service.

    Args:
        home: home folder of the stack.
        connect_seconds: timeout of the connection to Postgres; None for the usual one.
    """
    stack = _load_stack(home)
    return stack.info if stack is not None and stack.is_up(connect_seconds=connect_seconds) else None


def read_status(home: Path) -> list[ServiceStatus]:
    """Return the status of the services in `home`; start no service."""
    stack = _load_stack(home) or EmbeddedStack(home.resolve(), StackState())
    return [_read_postgres_status(stack), _read_web_status(stack.mlflow), _read_web_status(stack.dashboard)]


def _read_postgres_status(stack: EmbeddedStack) -> ServiceStatus:
    if (server := stack.server) is None:
        return ServiceStatus("Postgres", "stopped", None, None, f"not set up yet in {str(stack.home)!r}")
    record, detail = stack.state.postgres, f"data in {server.data_folder}"
    url = server.format_address(record.port) if record.port else None
    if (process := server.find_process()) is None:
        return _make_stopped_status(stack.home, "Postgres", url, record, server.log, detail)
    if (error := stack.find_postgres_error()) is not None:
        if (why := format_rejection_reason(error)) is not None:
            return ServiceStatus("Postgres", "running", url, process.pid, f"it rejects connections: {why}")
        return _make_silent_status("Postgres", url, process, server.log)
    return ServiceStatus("Postgres", "running", url, process.pid, detail)


def _read_web_status(service: WebService) -> ServiceStatus:
    url = service.url if service.record.port else None
    if (process := service.find()) is None:
        return _make_stopped_status(service.home, service.name, url, service.record, service.log, "")
    if not service.is_healthy():
        return _make_silent_status(service.name, url, process, service.log, hangs=service.is_listening())
    return ServiceStatus(service.name, "running", url, process.pid, f"log in {service.log}")


def _make_stopped_status(
    home: Path, name: str, url: str | None, record: ServiceRecord, log: Path, detail: str
) -> ServiceStatus:
    if record.process is None or not record.is_of(home):
        return ServiceStatus(name, "stopped", url, None, detail)
    return ServiceStatus(name, "dead", url, None, f"it ended unexpectedly; see {log}")


def _make_silent_status(
    name: str, url: str | None, process: psutil.Process, log: Path, *, hangs: bool = False
) -> ServiceStatus:
    """Return the status of a service that runs and does not answer; `hangs` is true if it has bound its port."""
    if not hangs and time.time() - process.create_time() < START_TIMEOUT:
        return ServiceStatus(name, "starting", url, process.pid, f"it does not answer yet; see {log}")
    return ServiceStatus(name, "dead", url, process.pid, f"it does not answer; see {log}")


def _load_stack(home: Path) -> EmbeddedStack | None:
    """Return the stack from the state file in `home`; None if the file is missing or damaged."""
    home = home.resolve()
    try:
        state = load_state(home)
    except OSError as error:
        raise StorageError(
            f"{HOME_VARIABLE} {str(home)!r} cannot be read ({error.strerror}); set another folder"
        ) from None
    if state is None:
        return None
    _send_token(home)
    return EmbeddedStack(home, state)


def _send_token(home: Path) -> None:
    """Let all MLflow clients in this process send the token of the stack in `home` to its services."""
    remember_home(home)
    os.environ.setdefault("MLFLOW_TRACKING_AUTH", AUTH_NAME)


@contextmanager
def _lock_stack(
    home: Path, progress: OnProgress = lambda _: None, dashboard: Sequence[str] = ()
) -> Iterator[EmbeddedStack]:
    """Lock the stack and yield it; wait while another command, which may be starting the services, holds the lock."""
    import filelock

    home = home.resolve()
    lock = filelock.FileLock(home / _LOCK_FILE, mode=0o600)
    try:
        try:
            lock.acquire(timeout=0.2)
        except filelock.Timeout:
            progress("waiting for another hpsearch command that starts or stops the services")
            lock.acquire(timeout=_LOCK_TIMEOUT)
    except filelock.Timeout:
        raise StorageError(
            f"a process has locked {str(home / _LOCK_FILE)!r} for {_LOCK_TIMEOUT / 60:.0f} minutes; end that process"
        ) from None
    except (OSError, NotImplementedError) as error:
        raise StorageError(f"{HOME_VARIABLE} {str(home)!r} cannot be locked ({error}); set a local folder") from None
    try:
        yield EmbeddedStack(home, load_state(home) or StackState(), dashboard)
    except OSError as error:  # for example a full disk, or a removed folder
        remedy = suggest_disk_remedy(error, "set another folder")
        raise StorageError(f"{HOME_VARIABLE} {str(home)!r} cannot be used ({error}); {remedy}") from error
    finally:
        lock.release()
