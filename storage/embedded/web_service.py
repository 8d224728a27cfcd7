"""A service of the embedded stack that speaks HTTP: found again, adopted, or started."""

from __future__ import annotations

import http.client
import os
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from hpsearch.storage.embedded import process
from hpsearch.storage.embedded import state as ports
from hpsearch.storage.embedded.state import ServiceRecord
from hpsearch.storage.errors import StorageError
from hpsearch.storage.urls import redact

START_TIMEOUT = 180.0  # seconds; MLflow needs 5 to 20 on an idle machine
_ADOPT_TIMEOUT = 60.0  # after which a process that is there but silent is started anew
_REQUEST_TIMEOUT = 10.0
_STOP_TIMEOUT = 10.0

# What the user set for other servers must not reach ours.
_FOREIGN = ("MLFLOW_", "_MLFLOW_", "PG", "HPSEARCH_", "OPTUNA_")


@dataclass
class WebService:
    """One service; `record` is kept in step with what happens, and `save` writes it down.

    Attributes:
        name: As the user reads it.
        health_path: A request that is answered with 200 when the service works.
        command: Makes command and added environment from a port.
        marker: Tells the processes of this service of this home from all others.
    """

    name: str
    health_path: str
    command: Callable[[int], tuple[list[str], dict[str, str]]]
    record: ServiceRecord
    save: Callable[[], None]
    home: Path
    log: Path

    @property
    def url(self) -> str:
        """Where the service listens."""
        return f"http://{ports.LOOPBACK}:{self.record.port}"

    @property
    def marker(self) -> str:
        """What its processes carry in their environment."""
        return f"{self.name}:{self.home}"

    def find(self) -> psutil.Process | None:
        """Return its main process, if it runs."""
        return process.find(self.record.process)

    def answers(self) -> bool:
        """Whether it answers a health request."""
        if self.record.port is None:
            return False
        server = http.client.HTTPConnection(ports.LOOPBACK, self.record.port, timeout=_REQUEST_TIMEOUT)
        with suppress(OSError, http.client.HTTPException), closing(server) as connection:
            connection.request("GET", self.health_path)
            return connection.getresponse().status == http.client.OK
        return False

    def listens(self) -> bool:
        """Whether it has come as far as taking its port: what is silent after that hangs."""
        return process.listens(self._all(), self.record.port or 0)

    def begin(self, database_port: int, tracking_port: int | None = None) -> None:
        """Adopt the running service, or start it; `finish` waits for it.

        Args:
            database_port: Where its database is now; a service that was started for another place is started anew.
            tracking_port: Where the MLflow server is now, if it uses one.
        """
        then, now = (self.record.database_port, self.record.tracking_port), (database_port, tracking_port)
        if self.find() is not None and then == now:
            return
        self.record.database_port, self.record.tracking_port = now
        self._restart()

    def finish(self) -> None:
        """Wait until the service answers.

        Raises:
            StorageError: It ends, or stays silent.
        """
        if self._wait(_ADOPT_TIMEOUT if self._is_adopted() else START_TIMEOUT):
            return
        for _ in range(2):  # it was adopted and is stuck, or somebody was quicker to take its port
            if self.find() is None and (self.record.port is None or ports.is_free(self.record.port)):
                break
            self._restart()
            if self._wait(START_TIMEOUT):
                return
        last = redact(process.tail(self.log))
        state = "does not answer" if self.find() else "ended at its start"
        raise StorageError(f"{self.name} {state}: {last or 'it wrote nothing'} (see {self.log})")

    def stop(self) -> int | None:
        """Stop the service with all its processes; return the main one's id, or None if none ran."""
        processes = self._all()
        process.stop(processes, timeout=_STOP_TIMEOUT)
        self.record.process = None
        return processes[0].pid if processes else None

    def _is_adopted(self) -> bool:
        found = self.record.process
        return found is not None and time.time() - found.started > _ADOPT_TIMEOUT

    def _all(self) -> list[psutil.Process]:
        main = self.find()
        marked = process.find_marked(self.marker)
        return [main, *(other for other in marked if other != main)] if main else marked

    def _restart(self) -> None:
        # The threads of a killed process may hold its port a moment longer than it is there.
        port = ports.choose(self.record.port, patience=2.0 if self.stop() else 0.0)
        self.record.port = port
        self.save()
        command, added = self.command(port)
        env = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        env |= {"PYTHONUNBUFFERED": "1", process.MARKER: self.marker} | added
        self.record.process = process.spawn(command, log=self.log, env=env, cwd=self.home)
        self.save()

    def _wait(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self.find() is not None:
            # Two stacks that start at once may have chosen the same port: the answer could be the other one's.
            if self.answers() and self.listens():
                return True
            time.sleep(0.05)  # until it answers
        return False
