"""The state file of the embedded services, and their ports."""

from __future__ import annotations

import json
import secrets
import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from hpsearch.storage.embedded.process import Identity, wait_until
from hpsearch.storage.files import write_private

FILE = "stack.json"


@dataclass
class ServiceRecord:
    """What is remembered of one service.

    Attributes:
        port: Where it listens, or listened last.
        process: Its process; None once it was stopped.
        database_port: Where its database was when it was started.
        tracking_port: Where the MLflow server was, if it uses one.
    """

    port: int | None = None
    process: Identity | None = None
    database_port: int | None = None
    tracking_port: int | None = None


def _password() -> str:
    return secrets.token_urlsafe(24)


@dataclass
class State:
    """What is remembered of a stack; `version` is that of the file's format."""

    version: Literal[1] = 1
    owner_password: str = field(default_factory=_password)
    worker_password: str = field(default_factory=_password)
    mlflow_password: str = field(default_factory=_password)
    postgres_folder: str | None = None
    postgres: ServiceRecord = field(default_factory=ServiceRecord)
    mlflow: ServiceRecord = field(default_factory=ServiceRecord)
    dashboard: ServiceRecord = field(default_factory=ServiceRecord)

    def save(self, home: Path) -> None:
        """Write the state, whole."""
        write_private(home / FILE, json.dumps(asdict(self), indent=2) + "\n")


def load(home: Path) -> State | None:
    """Return the state of `home`; None where there is none that can be read.

    Nothing is lost with a damaged file: the passwords are set anew at the next start, and services that nobody
    remembers are found by the marker in their environment.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(State).validate_json((home / FILE).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValidationError):
        return None


LOOPBACK = "127.0.0.1"


def is_free(port: int) -> bool:
    """Whether a server could listen on the port now."""
    with socket.socket() as listener:
        # As the servers do: a port in TIME_WAIT is free, one that somebody listens on is not.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def choose(remembered: int | None, *, patience: float = 0.0) -> int:
    """Return the remembered port if it is free, or comes to be within `patience` seconds, else another that is."""
    if remembered and wait_until(lambda: is_free(remembered), timeout=patience):
        return remembered
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        port: int = listener.getsockname()[1]
        return port
