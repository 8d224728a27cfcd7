"""An HTTP service of the embedded stack: find, attach, start and stop."""

from __future__ import annotations

import http.client
import os
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from hpsearch.redaction import redact
from hpsearch.storage.embedded import process
from hpsearch.storage.embedded import state as ports
from hpsearch.storage.embedded.state import ServiceRecord
from hpsearch.storage.errors import StorageError
from hpsearch.storage.files import read_tail
from hpsearch.storage.sockets import LOOPBACK
from hpsearch.storage.web.connections import OwnServerConnection
from hpsearch.storage.web.token import derive

START_TIMEOUT = 180.0  # seconds; MLflow needs 5 to 20 on an idle machine
_ATTACH_TIMEOUT = 60.0  # seconds; a running process that does not answer by then is restarted
_REPORT_AFTER = 2.0
_REQUEST_TIMEOUT = 10.0
_STOP_TIMEOUT = 10.0
_PORT_TIMEOUT = 2.0  # the port of a killed process may stay bound for a moment
_MAX_FORMER_PORTS = 100

# Environment variables that the user set for other servers.
_FOREIGN_PREFIXES = ("MLFLOW_", "_MLFLOW_", "PG", "HPSEARCH_", "OPTUNA_")


@dataclass
class WebService:
    """HTTP service of the embedded stack.

    Attributes:
        name: name of the service.
        health_path: path of a GET request that returns 200 if the service works.
        command: function that returns the command line and additional environment variables for a port.
        record: current state of the service.
        token: token that the service demands; None if it accepts requests without a token.
        save_state: function that writes the state file, which contains `record`.
        home: home folder, which is the working directory of the service.
        log: log file of the service.
    """

    name: str
    health_path: str
    command: Callable[[int], tuple[list[str], dict[str, str]]]
    record: ServiceRecord
    token: Callable[[], str | None]
    save_state: Callable[[], None]
    home: Path
    log: Path
    _has_started: bool = field(default=False, init=False)  # whether this object has started a process

    @property
    def url(self) -> str:
        """Address of the service."""
        return f"http://{LOOPBACK}:{self.record.port}"

    @property
    def process_marker(self) -> str:
        """Value in the environment of the service's processes, unique for this service and home folder."""
        return self._make_marker(self.home)

    def _make_marker(self, home: str | Path) -> str:
        return f"{self.name}:{home}"

    def find(self) -> psutil.Process | None:
        """Return the main process of the service; None if it does not run.

        The process of another home, of which this home is a copy, is not returned.
        """
        found = process.find(self.record.process)
        is_foreign = found is not None and process.has_working_folder(found, self.home) is False
        return None if is_foreign else found

    def is_healthy(self, timeout: float = _REQUEST_TIMEOUT) -> bool:
        """Return whether the service answers a health request within the timeout in seconds."""
        if self.record.port is None:
            return False
        token = self.token()
        server = OwnServerConnection(LOOPBACK, self.record.port, timeout=timeout)
        with suppress(OSError, http.client.HTTPException), closing(server) as connection:
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            connection.request("GET", self.health_path, headers=headers)
            return connection.getresponse().status == http.client.OK
        return False

    def is_listening(self) -> bool:
        """Return whether the service has bound its port; a service that then does not answer is considered to hang."""
        return process.is_listening(self._find_processes(), self.record.port or 0)

    def ensure_started(self, database_port: int, tracking_port: int | None = None) -> None:
        """Start the service, unless it runs with the same ports and the same token.

        `wait_until_healthy` waits until it answers.

        Args:
            database_port: port of Postgres; a service that was started with another Postgres port is restarted.
            tracking_port: port of the MLflow server, likewise; None for a service that does not use MLflow.
        """
        record, digest = self.record, self._digest_token()
        old = (record.database_port, record.tracking_port, record.token_digest)
        if self.find() is not None and old == (database_port, tracking_port, digest) and record.is_of(self.home):
            return
        record.database_port, record.tracking_port, record.token_digest = database_port, tracking_port, digest
        self._restart()

    def has_current_token(self) -> bool:
        """Return whether the service was started with the current token, or without one if none is needed."""
        return self.record.token_digest == self._digest_token()

    def _digest_token(self) -> str | None:
        return derive(token, "service") if (token := self.token()) is not None else None

    def wait_until_healthy(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Wait until the service answers.

        Args:
            progress: called with a line of text if a service that was running does not answer soon.

        Raises:
            StorageError: the service exits, or does not answer in time.
        """
        if self._is_attached():
            is_healthy = self._wait(_REPORT_AFTER)
            if not is_healthy and (found := self.find()) is not None:
                progress(f"{self.name} (process {found.pid}) does not answer; waiting up to {_ATTACH_TIMEOUT:.0f} s")
                is_healthy = self._wait(_ATTACH_TIMEOUT)
        else:
            is_healthy = self._wait(START_TIMEOUT)
        if is_healthy:
            return
        for _ in range(2):  # an attached service is stuck or was just stopped, or another process took the port
            is_gone = self.find() is None
            port = self.record.port
            if self._has_started and is_gone and (port is None or ports.is_port_free(port)):
                break
            progress(f"restarting {self.name}")
            self._restart(keeps_port=not is_gone)  # after a failed start, another user may hold the port
            if self._wait(START_TIMEOUT):
                return
        last = redact(read_tail(self.log))
        state = "does not answer" if self.find() else "ended during its start"
        raise StorageError(f"{self.name} {state}: {last or 'no output'} (see {self.log})")

    def stop(self) -> int | None:
        """Stop all processes of the service; return the id of the main process, or None if no process was running."""
        processes = self._find_processes()
        process.stop(processes, timeout=_STOP_TIMEOUT)
        self.record.process = None
        return processes[0].pid if processes else None

    def _is_attached(self) -> bool:
        found = self.record.process
        return found is not None and time.time() - found.started > _ATTACH_TIMEOUT

    def _find_processes(self) -> list[psutil.Process]:
        main, markers = self.find(), {self.process_marker, self._make_marker(self.record.home or self.home)}
        marked = [
            found
            for marker in markers
            for found in process.find_by_marker(marker)
            if process.has_working_folder(found, self.home) is not False  # else of a home that was moved or copied
        ]
        return [main, *(other for other in marked if other != main)] if main else marked

    def _should_keep_port(self) -> bool:
        """Return whether the next start uses the last port: after a crash, because running workers have the address.

        After a stop or a reboot, another user may have used the port. A service worker of a page of this user would
        remain in the owner's browser, and read the token and all pages at the address.
        """
        last = self.record.process
        return last is not None and last.started > psutil.boot_time()

    def _restart(self, *, keeps_port: bool = True) -> None:
        self._has_started = True
        used = {self.record.port or 0, *self.record.former_ports}
        preferred = self.record.port if keeps_port and self._should_keep_port() else None
        port = ports.choose_port(used)  # before the stop, because it may fail
        wait = _PORT_TIMEOUT if self.stop() else 0.0
        if preferred and process.wait_until(partial(ports.is_port_free, preferred), timeout=wait):
            port = preferred
        if self.record.port not in {None, port}:
            # Running clients have this address, and must not trust another user's process that has taken it.
            former = [known for known in self.record.former_ports if known != port]
            self.record.former_ports = [*former, self.record.port][-_MAX_FORMER_PORTS:]
        self.record.port, self.record.home = port, str(self.home)
        self.save_state()
        command, added = self.command(port)
        env = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN_PREFIXES)}
        env |= {"PYTHONUNBUFFERED": "1", process.MARKER_VARIABLE: self.process_marker} | added
        self.record.process = process.spawn(command, log=self.log, env=env, cwd=self.home, umask=0o077)
        self.save_state()

    def _wait(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self.find() is not None:
            # Two stacks that start at the same time may choose the same port, so the other stack may have answered.
            if self.is_healthy(min(timeout, _REQUEST_TIMEOUT)) and self.is_listening():
                return True
            time.sleep(0.05)
        return False
