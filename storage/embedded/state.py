"""The state file of the embedded services, and their ports."""

from __future__ import annotations

import errno
import json
import secrets
from collections.abc import Container
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from hpsearch.storage.embedded.process import ProcessIdentity
from hpsearch.storage.errors import StorageError
from hpsearch.storage.files import write_private
from hpsearch.storage.home import STATE_FILE, read_own_text
from hpsearch.storage.sockets import LOOPBACK, bind_exclusively, close_all

_PORTS = range(1 << 14, 1 << 16)
_PORT_TRIES = 100


@dataclass
class ServiceRecord:
    """Stored state of one service.

    Attributes:
        port: current or last port of the service.
        process: process of the service; None after a stop.
        database_port: port of Postgres when the service was started.
        tracking_port: port of the MLflow server when the service was started; None if the service does not use MLflow.
        token_digest: digest of the token with which the service was started; None if it was started without one.
        home: home folder when the service was started; None in files of earlier versions.
        former_ports: earlier ports of a web service, the latest last.
    """

    port: int | None = None
    process: ProcessIdentity | None = None
    database_port: int | None = None
    tracking_port: int | None = None
    token_digest: str | None = None
    home: str | None = None
    former_ports: list[int] = field(default_factory=list)

    def is_of(self, home: Path) -> bool:
        """Return whether the service was started in this home folder. It was not if the folder was moved or copied."""
        try:
            return self.home is None or Path(self.home).samefile(home)
        except OSError:  # the former path of a moved home
            return False


def _make_password() -> str:
    return secrets.token_urlsafe(24)


@dataclass
class StackState:
    """Stored state of a stack.

    `version` is the version of the file format; `needs_token` is False after `hpsearch up --no-auth`. `linked_port` is
    MLflow's port in the stored links.
    """

    version: Literal[1] = 1
    owner_password: str = field(default_factory=_make_password)
    worker_password: str = field(default_factory=_make_password)
    mlflow_password: str = field(default_factory=_make_password)
    postgres_folder: str | None = None
    needs_token: bool = True
    linked_port: int | None = None
    postgres: ServiceRecord = field(default_factory=ServiceRecord)
    mlflow: ServiceRecord = field(default_factory=ServiceRecord)
    dashboard: ServiceRecord = field(default_factory=ServiceRecord)

    def save(self, home: Path) -> None:
        """Write the state file atomically."""
        write_private(home / STATE_FILE, json.dumps(asdict(self), indent=2) + "\n")


def load_state(home: Path) -> StackState | None:
    """Return the state of the stack in `home`; None if the file is missing or damaged.

    A damaged file does no harm: the next start sets new passwords, and finds running services by the marker in the
    environment of their processes.

    Raises:
        OSError: the file cannot be read, or belongs to another user.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(StackState).validate_json(read_own_text(home / STATE_FILE))
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError, ValidationError):
        return None


def is_port_free(port: int) -> bool:
    """Return whether `listen_exclusively` can use the port at the moment.

    Raises:
        OSError: no port can be tried, for example because this process has too many open files.
    """
    try:
        close_all(bind_exclusively(LOOPBACK, port))
    except OSError as error:
        # A damaged state file may have any number, and the kernel or a sandbox may reserve ports.
        if error.errno in {errno.EADDRINUSE, errno.EACCES, errno.EPERM, errno.EINVAL}:
            return False
        raise
    return True


def choose_port(excluded: Container[int] = ()) -> int:
    """Return a free port that is not excluded.

    Raises:
        StorageError: no free port was found.
        OSError: no port can be tried.
    """
    # Other users can influence the kernel's choice by occupying ports, and could prepare pages in the user's browser
    # for the chosen address.
    for _ in range(_PORT_TRIES):
        port = secrets.choice(_PORTS)
        if port not in excluded and is_port_free(port):
            return port
    raise StorageError(f"almost all ports of {LOOPBACK} are in use; end programs that use them")
