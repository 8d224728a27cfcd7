"""The embedded Postgres server: initialize, start, stop."""

from __future__ import annotations

import fcntl
import os
import platform
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from hpsearch.storage.database.connect import answers
from hpsearch.storage.embedded import process, state
from hpsearch.storage.embedded.postgres_account import Account, find_account, reachable
from hpsearch.storage.embedded.postgres_binaries import Binaries, find_binaries
from hpsearch.storage.errors import StorageError
from hpsearch.storage.files import write_private
from hpsearch.storage.urls import build

SUPERUSER = "postgres"
_ELSEWHERE = "set HPSEARCH_HOME to another folder"


def create(folder: Path, binaries: Binaries, account: Account) -> None:
    """Set up `folder/data`, and the superuser's password in `folder/password` (0600).

    It is made beside its place and then moved there, so that a half-made one is never used.

    Raises:
        StorageError: `initdb` failed.
    """
    for leftover in folder.glob("initdb-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    if not (folder / "password").exists():
        write_private(folder / "password", secrets.token_urlsafe(24))
    with tempfile.TemporaryDirectory(prefix="initdb-", dir=folder, ignore_cleanup_errors=True) as made:
        workshop = Path(made)
        password = workshop / "password"
        write_private(password, read_password(folder))
        if account.switch:
            for path in (workshop, password):
                os.chown(path, account.uid, account.gid)
        result = subprocess.run(
            [
                str(binaries.bin / "initdb"),
                *("-D", str(workshop / "data"), "-U", SUPERUSER, "--pwfile", str(password)),
                *("--auth=scram-sha-256", "--encoding=UTF8", "--no-locale"),
            ],
            capture_output=True,
            text=True,
            cwd="/",
            env=clean_environment(),
            check=False,
            **account.popen,
        )
        if result.returncode != 0:
            text = " ".join((result.stderr.strip() or result.stdout.strip()).split())
            raise StorageError(f"Postgres cannot set up its data directory in {str(folder)!r}: {text}")
        (workshop / "data").rename(folder / "data")


def read_password(folder: Path) -> str:
    """Return the superuser's password.

    Raises:
        StorageError: Its file is gone.
    """
    path = folder / "password"
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        raise StorageError(
            f"{str(path)!r}, the password of the embedded Postgres, is missing: put it back, or {_ELSEWHERE}"
        ) from None


def major_version(data: Path) -> str | None:
    """Return the major version of Postgres that made the data directory; None if there is none yet.

    Raises:
        StorageError: There is a folder which is no data directory.
    """
    try:
        return (data / "PG_VERSION").read_text().strip()
    except FileNotFoundError:
        if not data.exists():
            return None
    raise StorageError(
        f"{str(data)!r} is not a data directory of Postgres (it has no PG_VERSION): move it away, or {_ELSEWHERE}"
    )


def forget_stranger(data: Path) -> None:
    """Remove a stale pid file whose process id now belongs to somebody else; call it when no server runs.

    Postgres would take that process for a server of its own and not start. A pid file whose process is gone is left to
    Postgres, which also looks for children of the dead server that still use its memory.
    """
    pid_file = data / "postmaster.pid"
    try:
        stale = psutil.pid_exists(int(pid_file.read_text().split("\n", 1)[0]))
    except FileNotFoundError:
        return
    except ValueError:  # cut off by a crash while it was written
        stale = True
    if stale:
        pid_file.unlink()


def try_lock(folder: Path) -> int | None:
    """Take the lock that a server and its children hold as long as one of them lives: they inherit the descriptor.

    It keeps a second server off a data directory where process ids say nothing: from another machine that shares the
    folder, from another container, or beside children of a server that was killed.

    Returns:
        The descriptor; None if somebody has the lock.

    Raises:
        StorageError: The file system has no locks.
    """
    descriptor = os.open(folder / "running", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, platform.node().encode(), 0)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        os.close(descriptor)
        raise StorageError(
            f"{str(folder)!r} is on a file system without locks ({error.strerror}): "
            "set HPSEARCH_HOME to a folder on a local disk"
        ) from None
    return descriptor


def lock_holder(folder: Path) -> str:
    """Return the name of the machine that took the lock last."""
    return (folder / "running").read_text(errors="replace") or "another machine"


def clean_environment() -> dict[str, str]:
    """Return our environment without the variables that would change a Postgres program's mind."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")} | {"LC_ALL": "C"}


# On the command line, so that a newer hpsearch changes them for an old data directory too.
_SETTINGS = {
    "listen_addresses": state.LOOPBACK,
    "unix_socket_directories": "",  # a socket's path may have 107 bytes at most, a home folder more
    "max_connections": "200",
    "cluster_name": "hpsearch",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_line_prefix": "%m [%p] %a ",
}
_START_TIMEOUT = 300.0  # seconds; after a crash the log is replayed first
_ADOPT_TIMEOUT = 60.0  # after which a server that is there but silent is started anew
_STOP_TIMEOUT = 30.0
_LOCK_TIMEOUT = 15.0  # for the children of a killed server to end
_POLL = 0.03


def database_url(user: str, password: str, port: int, database: str, *, application_name: str = "") -> str:
    """Return the URL of a database of an embedded server."""
    # The wheel's Postgres has no TLS; said here, the user's PGSSLMODE does not ask for it.
    query = "sslmode=disable" + (f"&application_name={application_name}" if application_name else "")
    return build(user=user, password=password, host=state.LOOPBACK, port=port, database=database, query=query)


@dataclass(frozen=True)
class Server:
    """The embedded server of one home folder.

    Attributes:
        folder: Holds `data` (the data directory), `password` (the superuser's) and `running` (the lock).
        log: Where it writes.
    """

    folder: Path
    log: Path

    @property
    def data(self) -> Path:
        """The data directory."""
        return self.folder / "data"

    @property
    def password(self) -> str:
        """The superuser's password."""
        return read_password(self.folder)

    def url(self, port: int) -> str:
        """Return the URL for the superuser where the server listens on `port`."""
        return database_url(SUPERUSER, self.password, port, "postgres")

    def running(self) -> psutil.Process | None:
        """Return the server's process if it runs: alive, and started on this very data directory."""
        try:
            pid = int((self.data / "postmaster.pid").read_text().split("\n", 1)[0])
            found = psutil.Process(pid)
            command = found.cmdline()
        except (OSError, ValueError, psutil.Error):
            return None
        ours = bool(command) and Path(command[0]).name == "postgres" and str(self.data) in command
        return found if ours and process.is_running(found) else None

    def identity(self) -> process.Identity | None:
        """Return what the running server's process is known by."""
        server = self.running()
        if server is None:
            return None
        return process.Identity(server.pid, server.create_time(), tuple(server.cmdline()))

    def port(self) -> int | None:
        """Return the port of the running server, from the file that it writes."""
        try:
            return int((self.data / "postmaster.pid").read_text().splitlines()[3])
        except (OSError, ValueError, IndexError):
            return None

    def adopt(self) -> int | None:
        """Return the port of the server if one runs and answers, or comes to answer; stop one that is stuck."""
        deadline = time.monotonic() + _ADOPT_TIMEOUT
        while self.running() is not None:
            port = self.port()
            if port and answers(self.url(port)):
                return port
            if time.monotonic() > deadline:
                self.stop()
            time.sleep(_POLL)
        return None

    def start(self, remembered: int | None) -> int:
        """Start the server, set up first where there is none yet, and return its port when it answers.

        Raises:
            StorageError: No binaries, a data directory of another major version, one that is in use elsewhere, or the
                server ends at once.
        """
        account = find_account(self.data)
        major = major_version(self.data)
        binaries = reachable(find_binaries(major=major), account, self.folder)
        if major is None:
            create(self.folder, binaries, account)
        for _ in range(3):
            if (lock := self._wait_for_lock()) is None:
                if adopted := self.adopt():
                    return adopted
                continue
            port = state.choose(remembered)
            if self._launch(binaries, account, port, lock):
                return port
            remembered = None  # somebody was quicker to take the port
        raise StorageError(f"Postgres cannot be started on {state.LOOPBACK}: see {self.log}")

    def stop(self) -> int | None:
        """Stop the server in order, its clients disconnected; return its process id, or None if none ran."""
        server = self.running()
        if server is None:
            return None
        for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):  # fast shutdown, immediate, none
            process.send([server], number)
            if process.wait([server], timeout=_STOP_TIMEOUT):
                break
        return server.pid

    def _wait_for_lock(self) -> int | None:
        """Return the lock's descriptor; None if a server of ours has it, started by somebody who was killed."""
        deadline = time.monotonic() + _LOCK_TIMEOUT
        while time.monotonic() < deadline:
            if (lock := try_lock(self.folder)) is not None:
                return lock
            if self.running() is not None:
                return None
            time.sleep(_POLL)
        raise StorageError(
            f"the Postgres of {str(self.folder)!r} still runs on {lock_holder(self.folder)}: run "
            "hpsearch down there, give --storage-url, or set HPSEARCH_HOME to another folder"
        )

    def _launch(self, binaries: Binaries, account: Account, port: int, lock: int) -> bool:
        """Start the server and wait until it answers; False if somebody else has the port."""
        command = [str(binaries.bin / "postgres"), "-D", str(self.data), "-p", str(port)]
        for name, value in _SETTINGS.items():
            command += ["-c", f"{name}={value}"]
        try:
            forget_stranger(self.data)
            identity = process.spawn(
                command,
                log=self.log,
                env=clean_environment(),
                cwd=Path("/"),
                pass_fds=(lock,),
                **account.popen,
            )
        finally:
            os.close(lock)
        deadline = time.monotonic() + _START_TIMEOUT
        while time.monotonic() < deadline:
            if answers(self.url(port)):
                return True
            if process.find(identity) is None:
                if not state.is_free(port):
                    return False
                raise StorageError(f"Postgres ended at its start: {process.tail(self.log, lines=2)} (see {self.log})")
            time.sleep(_POLL)
        raise StorageError(f"Postgres does not answer after {_START_TIMEOUT:.0f} s: see {self.log}")
