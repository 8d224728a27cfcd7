"""The embedded Postgres server: start, attach, stop."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from hpsearch.storage.database.connect import find_database_error, has_answered
from hpsearch.storage.database.libpq import make_embedded_query
from hpsearch.storage.embedded import process, state
from hpsearch.storage.embedded.data_directory import (
    SUPERUSER,
    init_data_directory,
    make_clean_environment,
    read_lock_holder,
    read_major_version,
    read_password,
    remove_stale_pid_file,
    try_lock,
)
from hpsearch.storage.embedded.postgres_account import Account, ensure_executable, find_account
from hpsearch.storage.embedded.postgres_binaries import Binaries, find_binaries
from hpsearch.storage.embedded.postgres_socket import (
    SOCKET_NAME,
    SOCKET_PORT,
    find_socket_folder,
    prepare_socket_folder,
    remove_socket_folder,
)
from hpsearch.storage.errors import ServiceUnavailableError, StorageError, format_error
from hpsearch.storage.files import read_tail
from hpsearch.storage.sockets import LOOPBACK, connect_to_loopback
from hpsearch.storage.urls import build_url

# Passed on the command line, so that a newer hpsearch also changes them for an existing data directory.
_SETTINGS = {
    "max_connections": "200",
    "cluster_name": "hpsearch",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_line_prefix": "%m [%p] %a ",
}
_START_TIMEOUT = 300.0  # seconds; includes the replay of the log after a crash
_ATTACH_TIMEOUT = 60.0  # a running server that does not answer by then is restarted
_STOP_TIMEOUT = 30.0
_LOCK_TIMEOUT = 15.0  # for the exit of the children of a killed server, or of a server that shuts down
_POLL = 0.03
_REPORT_AFTER = 2.0
QUICK_CONNECT_SECONDS = 2  # timeout of a connection before a wait is reported


def make_database_url(
    user: str, password: str, host: str, port: int, database: str, *, uid: int, application_name: str = ""
) -> str:
    """Return the URL of a database of an embedded server, whose processes have the user id `uid`.

    `host` is the loopback address, or the folder of the server's socket.
    """
    # The wheel's Postgres has neither TLS nor GSSAPI; the explicit modes override the user's PGSSLMODE, and keep libpq
    # from reading a Kerberos cache, which may be a pipe of another user in /tmp.
    # With require_auth, libpq sends no password in clear text to another program that took the port.
    query = f"sslmode=disable&gssencmode=disable&require_auth=scram-sha-256&{make_embedded_query(uid)}"
    query += f"&application_name={application_name}" if application_name else ""
    return build_url(user=user, password=password, host=host, port=port, database=database, query=query)


def check_loopback() -> None:
    """Check that this process can reach the loopback interface, which a sandbox without network does not have.

    Raises:
        StorageError: the loopback interface is down.
    """
    try:
        connect_to_loopback(9, timeout=1.0).close()
    except OSError as error:
        if error.errno in {errno.ENETUNREACH, errno.EADDRNOTAVAIL}:
            raise StorageError(
                f"{LOOPBACK} is not reachable ({error.strerror}); enable the loopback interface (ip link set lo up)"
            ) from None


def _describe_error(error: object) -> str:
    """Return why a connection failed, without the address, which no user has given."""
    reason = str(getattr(error, "__context__", None) or error).rpartition(" failed: ")[2].removeprefix("FATAL:")
    return format_error(reason.partition("\n")[0].strip() or error)


@dataclass(frozen=True)
class EmbeddedPostgres:
    """Embedded Postgres server of a home folder.

    Attributes:
        folder: folder with `data` (the data directory), `password` (the superuser's password), `running` (the lock
            file), and `socket` (the path of the socket's folder, if it is not the data directory).
        log: log file of the server.
        has_port: whether the server listens on the loopback address instead of a socket, as the servers of users do;
            for tests and benchmarks.
    """

    folder: Path
    log: Path
    has_port: bool = False

    @property
    def data_folder(self) -> Path:
        """Data directory."""
        return self.folder / "data"

    @property
    def password(self) -> str:
        """Password of the superuser."""
        return read_password(self.folder)

    @property
    def uid(self) -> int:
        """User id of the server, which runs as the owner of the data directory."""
        return self.data_folder.stat().st_uid

    def make_url(self, port: int) -> str:
        """Return the superuser's URL of this server, which listens on `port`."""
        return make_database_url(SUPERUSER, self.password, self.get_host(port), port, "postgres", uid=self.uid)

    def get_host(self, port: int) -> str:
        """Return the host in the URLs of this server, which has the port: the folder of its socket, or an address."""
        return str(find_socket_folder(self.folder)) if port == SOCKET_PORT else LOOPBACK

    def find_process(self) -> psutil.Process | None:
        """Return the server process of this data directory; None if no server runs."""
        try:
            pid = int((self.data_folder / "postmaster.pid").read_text().split("\n", 1)[0])
            found = psutil.Process(pid)
            command = found.cmdline()
        except (OSError, ValueError, psutil.Error):
            return None
        # The server works in its data directory, also after a move. After that, its command line has the former path.
        is_here = process.has_working_folder(found, self.data_folder)
        is_here = str(self.data_folder) in command if is_here is None else is_here
        ours = bool(command) and Path(command[0]).name == "postgres" and is_here
        return found if ours and process.is_running(found) else None

    def read_identity(self) -> process.ProcessIdentity | None:
        """Return the identity of the server process; None if no server runs."""
        if (server := self.find_process()) is None:
            return None
        return process.ProcessIdentity(server.pid, server.create_time(), tuple(server.cmdline()))

    def read_port(self) -> int | None:
        """Return the port of the running server, which is in the pid file; None if unknown."""
        try:
            return int((self.data_folder / "postmaster.pid").read_text().splitlines()[3])
        except (OSError, ValueError, IndexError):
            return None

    def format_address(self, port: int) -> str:
        """Return the address of this server for messages, without a login."""
        host = self.get_host(port)
        return f"{host}/.s.PGSQL.{port}" if host.startswith("/") else f"postgresql://{host}:{port}"

    def attach(self, progress: Callable[[str], None] = lambda _: None) -> int | None:
        """Wait until the running server answers, and return its port; None if no server runs.

        A server that does not answer within a minute is stopped.

        Args:
            progress: called with the reason of a wait of more than two seconds.

        Raises:
            StorageError: the server answers, but rejects the connection, or it cannot be stopped.
        """
        check_loopback()  # otherwise this method would stop a server that others use
        began, is_reported = time.monotonic(), False
        while (server := self.find_process()) is not None:
            port = self.read_port()
            seconds = None if is_reported else QUICK_CONNECT_SECONDS
            error = (
                find_database_error(self.make_url(port), connect_seconds=seconds) if port else StorageError("it starts")
            )
            if error is None:
                return port
            waited = time.monotonic() - began
            # An interrupted command may have begun to stop the server, whose processes are frozen.
            is_stopping = "the database system is shutting down" in str(error)
            if waited > _REPORT_AFTER and not is_reported:
                is_reported = True
                fault = f"it does not answer; see {self.log}" if "timeout" in str(error) else _describe_error(error)
                progress(f"waiting for Postgres (process {server.pid}): {fault}")
            if waited > (_LOCK_TIMEOUT if is_stopping else _ATTACH_TIMEOUT):
                if port == SOCKET_PORT and not (folder := Path(self.get_host(port))).exists():
                    raise StorageError(
                        f"Postgres (process {server.pid}) has its socket in {str(folder)!r}, which is missing here; "
                        "another job with its own /tmp may use this home; set HPSEARCH_HOME to another folder"
                    )
                if has_answered(error) and not is_stopping:  # a restart would end connections of others, and not help
                    raise StorageError(f"Postgres (process {server.pid}): {_describe_error(error)} (see {self.log})")
                self.stop()
                if self.find_process() is not None:
                    raise StorageError(
                        f"Postgres (process {server.pid}) does not answer, and this user may not stop it "
                        f"({_describe_error(error)}); stop it as its user or as root"
                    )
            time.sleep(_POLL)
        return None

    def start(self, preferred_port: int | None, progress: Callable[[str], None] = lambda _: None) -> int:
        """Start the server, wait until it answers, and return its port; a missing data directory is created.

        Args:
            preferred_port: port to use if it is free; None for any free port.
            progress: called with the reason of a wait of more than two seconds.

        Raises:
            StorageError: Postgres is not installed, the data directory belongs to another major version or is in use
                on another machine, or the server exits during its start.
        """
        check_loopback()
        account = find_account(self.data_folder)
        major = read_major_version(self.data_folder)
        binaries = ensure_executable(find_binaries(major=major), account, self.folder)
        if major is None:
            init_data_directory(self.folder, binaries, account)
        for _ in range(3):
            if (lock := self._wait_for_lock()) is None:
                if running := self.attach(progress):
                    return running
                continue
            account.admit(self.folder)
            account.take_over(self.data_folder)
            sockets = None if self.has_port else prepare_socket_folder(self.folder, account)
            port = SOCKET_PORT if sockets else preferred_port or state.choose_port()
            if self._launch(binaries, account, port, sockets, lock, progress):
                return port
            preferred_port = None  # another process took the port
        raise StorageError(f"Postgres cannot be started on {LOOPBACK}; see {self.log}")

    def stop(self) -> int | None:
        """Disconnect the clients and stop the server; return its process id, or None if no server was running."""
        if (server := self.find_process()) is None:
            self._remove_socket_folder()
            return None
        for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):  # fast shutdown, immediate shutdown, kill
            process.send_signal([server], number)
            if process.wait_for_exit([server], timeout=_STOP_TIMEOUT):
                break
        self._remove_socket_folder()
        return server.pid

    def _remove_socket_folder(self) -> None:
        """Remove the temporary folder of the socket, which a killed server leaves too."""
        with contextlib.suppress(OSError, StorageError):  # such as a read-only file system
            uid = self.uid
            if (lock := try_lock(self.folder)) is not None:  # else another command starts a server
                try:
                    remove_socket_folder(self.folder, uid)
                finally:
                    os.close(lock)

    def _wait_for_lock(self) -> int | None:
        """Wait for the lock and return its descriptor; None if a running server of this folder holds the lock."""
        deadline = time.monotonic() + _LOCK_TIMEOUT
        while time.monotonic() < deadline:
            if (lock := try_lock(self.folder)) is not None:
                return lock
            if self.find_process() is not None:
                return None
            time.sleep(_POLL)
        raise StorageError(
            f"the Postgres of {str(self.folder)!r} is still running on {read_lock_holder(self.folder)}; run "
            "hpsearch down on that machine, give --storage-url, or set HPSEARCH_HOME to another folder"
        )

    def _launch(
        self,
        binaries: Binaries,
        account: Account,
        port: int,
        sockets: Path | None,
        lock: int,
        progress: Callable[[str], None],
    ) -> bool:
        """Start the server, wait until it answers, and return True; return False if another process uses the port."""
        command = [str(binaries.bin_folder / "postgres"), "-D", str(self.data_folder), "-p", str(port)]
        listeners = {
            "listen_addresses": "" if sockets else LOOPBACK,
            # Relative to the data directory, so that its path can have any characters.
            "unix_socket_directories": "." if sockets == self.data_folder else str(sockets or ""),
        }
        for name, value in (listeners | _SETTINGS).items():
            command += ["-c", f"{name}={value}"]
        try:
            remove_stale_pid_file(self.data_folder)
            if sockets:
                (sockets / f"{SOCKET_NAME}.lock").unlink(missing_ok=True)
            identity = process.spawn(
                command,
                log=self.log,
                env=make_clean_environment(),
                cwd=Path("/"),
                pass_fds=(lock,),
                **account.popen_options,
            )
        finally:
            os.close(lock)
        began, is_reported = time.monotonic(), False
        while (waited := time.monotonic() - began) < _START_TIMEOUT:
            if (error := find_database_error(self.make_url(port))) is None:
                return True
            if waited > _REPORT_AFTER and not is_reported:
                is_reported = True
                progress(f"waiting for Postgres (process {identity.pid}): {_describe_error(error)}")
            is_permanent = isinstance(error, StorageError) and not isinstance(error, ServiceUnavailableError)
            if waited > _REPORT_AFTER and is_permanent:  # such as a wrong password
                raise StorageError(f"Postgres (process {identity.pid}): {_describe_error(error)} (see {self.log})")
            if process.find(identity) is None:
                if not sockets and not state.is_port_free(port):
                    return False
                output = read_tail(self.log, lines=2)
                remedy = "; enlarge /dev/shm (Docker: --shm-size=1g)" if "shared memory segment" in output else ""
                raise StorageError(f"Postgres ended during its start: {output} (see {self.log}){remedy}")
            time.sleep(_POLL)
        raise StorageError(
            f"Postgres does not answer after {_START_TIMEOUT:.0f} s: {_describe_error(error)} (see {self.log})"
        )
