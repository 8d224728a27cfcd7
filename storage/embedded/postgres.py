"""The embedded Postgres server: initialize, start, stop."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from hpsearch.host_name import get_host_name
from hpsearch.storage.database.connect import find_database_error, has_answered
from hpsearch.storage.database.libpq import make_embedded_query
from hpsearch.storage.embedded import process, state
from hpsearch.storage.embedded.postgres_account import Account, ensure_executable, find_account, find_setup_account
from hpsearch.storage.embedded.postgres_binaries import Binaries, find_binaries
from hpsearch.storage.errors import ServiceUnavailableError, StorageError, format_error
from hpsearch.storage.files import read_tail, write_private
from hpsearch.storage.home import read_own_text
from hpsearch.storage.sockets import LOOPBACK
from hpsearch.storage.urls import build_url

SUPERUSER = "postgres"
_LONGEST_FOLDER_BYTES = 900  # Postgres limits the paths of its files to 1023 bytes
_TEMPORARY_FOLDER = "/tmp"  # noqa: S108 for a private folder; TMPDIR may have a long path
_REMEDY = "set HPSEARCH_HOME to another folder"


def init_data_directory(folder: Path, binaries: Binaries, account: Account) -> None:
    """Create the data directory `folder/data`, and `folder/password` (0600) with the superuser's password.

    `initdb` writes to a temporary folder, which is then renamed, so that an incomplete data directory is never used.

    Raises:
        StorageError: `initdb` failed.
    """
    if (length := len(os.fsencode(folder))) > _LONGEST_FOLDER_BYTES:
        raise StorageError(
            f"the path of the embedded Postgres, {str(folder)[:60]}..., has {length} bytes, but "
            f"{_LONGEST_FOLDER_BYTES} are possible; set --home or HPSEARCH_HOME to a folder with a shorter path"
        )
    for leftover in folder.glob("initdb-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    if not (folder / "password").exists():
        write_private(folder / "password", secrets.token_urlsafe(24))
    with tempfile.TemporaryDirectory(prefix="initdb-", dir=folder, ignore_cleanup_errors=True) as name:
        temporary, setup = Path(name) / "setup", find_setup_account(account)
        temporary.mkdir(mode=0o700)
        password = temporary / "password"
        write_private(password, read_password(folder))
        account.admit(Path(name))
        setup.take_over(temporary)
        result = subprocess.run(
            [
                str(binaries.bin_folder / "initdb"),
                *("-D", str(temporary / "data"), "-U", SUPERUSER, "--pwfile", str(password)),
                *("--auth=scram-sha-256", "--encoding=UTF8", "--no-locale"),
            ],
            capture_output=True,
            text=True,
            cwd="/",
            env=make_clean_environment(),
            check=False,
            **setup.popen_options,
        )
        if result.returncode != 0:
            text = " ".join((result.stderr.strip() or result.stdout.strip()).split())
            remedy = "; free disk space" if os.strerror(errno.ENOSPC) in text else ""
            raise StorageError(f"Postgres cannot set up its data directory in {str(folder)!r}: {text}{remedy}")
        account.take_over(temporary / "data")
        (temporary / "data").rename(folder / "data")


def read_password(folder: Path) -> str:
    """Return the superuser's password.

    Raises:
        StorageError: the password file is missing.
        OSError: it belongs to another user.
    """
    path = folder / "password"
    try:
        return read_own_text(path).strip()
    except FileNotFoundError:
        raise StorageError(f"{str(path)!r}, the password of Postgres, is missing; restore it, or {_REMEDY}") from None


def read_major_version(data: Path) -> str | None:
    """Return the major Postgres version of a data directory; None if the data directory does not exist yet.

    Raises:
        StorageError: the folder exists and is not a data directory.
    """
    try:
        return (data / "PG_VERSION").read_text().strip()
    except FileNotFoundError:
        if not data.exists():
            return None
    raise StorageError(f"{str(data)!r} is not a Postgres data directory (no PG_VERSION); move it away, or {_REMEDY}")


def remove_stale_pid_file(data: Path) -> None:
    """Remove a stale pid file whose process id now belongs to another program; call only while no server runs.

    Postgres would treat that process as a running server, and refuse to start. If no process has the id, the pid file
    stays: Postgres also uses the file to find children of the dead server that still use its shared memory.
    """
    pid_file = data / "postmaster.pid"
    try:
        is_stale = psutil.pid_exists(int(pid_file.read_text().split("\n", 1)[0]))
    except FileNotFoundError:
        return
    except ValueError:  # truncated by a crash
        is_stale = True
    if is_stale:
        pid_file.unlink()


def try_lock(folder: Path) -> int | None:
    """Try to acquire the lock of a data directory; a server and its children hold the lock by an inherited descriptor.

    The lock prevents a second server in cases that process ids do not show: on another machine that shares the folder,
    in another container, or while children of a killed server still run.

    Returns:
        The file descriptor that holds the lock; None if another process holds the lock.

    Raises:
        StorageError: the file system does not support locks.
    """
    descriptor = os.open(folder / "running", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, get_host_name().encode(), 0)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        os.close(descriptor)
        raise StorageError(
            f"{str(folder)!r} is on a file system without locks ({error.strerror}); set HPSEARCH_HOME to a local disk"
        ) from None
    return descriptor


def read_lock_holder(folder: Path) -> str:
    """Return the name of the machine that acquired the lock last."""
    return (folder / "running").read_text(errors="replace") or "another machine"


def make_clean_environment() -> dict[str, str]:
    """Return the variables of this process's environment that Postgres programs need.

    The others could override their settings (``PGOPTIONS``), or are secrets that their account may not read.
    """
    kept = {name: value for name, value in os.environ.items() if name.startswith(_KEPT_VARIABLES)}
    return kept | {"LC_ALL": "C"}


_KEPT_VARIABLES = ("PATH", "TMPDIR", "TZ", "LD_", "DYLD_", "NSS_WRAPPER_")  # beginnings of names

# In the name of the server's socket. On a port of the loopback address, another user could intercept connections with
# sockets that were bound to the port before the server listened.
SOCKET_PORT = 5432
_SOCKET_NAME = f".s.PGSQL.{SOCKET_PORT}"
_LONGEST_SOCKET_PATH = 107  # bytes

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


def _can_have_socket(folder: Path) -> bool:
    """Return whether clients can use a socket in a folder."""
    path = folder / _SOCKET_NAME
    if len(os.fsencode(path)) > _LONGEST_SOCKET_PATH or "," in str(path):  # libpq splits the path at commas
        return False
    probe = folder / ".s.PGSQL.test"
    try:
        with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
            probe.unlink(missing_ok=True)
            listener.bind(os.fsencode(probe))
            probe.chmod(0o700)
            listener.listen()
            client.connect(os.fsencode(probe))
            probe.unlink()
    except OSError:  # such as a file system without sockets
        return False
    return True


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
    with socket.socket() as probe:
        code = probe.connect_ex((LOOPBACK, 9))
    if code in {errno.ENETUNREACH, errno.EADDRNOTAVAIL}:
        raise StorageError(
            f"{LOOPBACK} is not reachable ({os.strerror(code)}); enable the loopback interface (ip link set lo up)"
        )


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
        return str(self._find_socket_folder()) if port == SOCKET_PORT else LOOPBACK

    def _find_socket_folder(self) -> Path:
        try:
            return Path(read_own_text(self.folder / "socket"))
        except FileNotFoundError:
            return self.data_folder

    def _prepare_socket_folder(self, account: Account) -> Path:
        """Return the folder of the socket: the data directory, or a private temporary folder if its path is too long.

        Raises:
            StorageError: no folder can have a socket.
        """
        if (folder := self._find_socket_folder()) != self.data_folder:
            with suppress(OSError):  # a program that cleans /tmp has removed it
                status = folder.lstat()
                is_private = stat.S_ISDIR(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o700
                if is_private and status.st_uid == account.uid and _can_have_socket(folder):
                    return folder
        (self.folder / "socket").unlink(missing_ok=True)
        if _can_have_socket(self.data_folder):
            return self.data_folder
        folder = Path(tempfile.mkdtemp(prefix="hpsearch-pg-", dir=_TEMPORARY_FOLDER))
        if not _can_have_socket(folder):
            folder.rmdir()
            raise StorageError(f"Postgres cannot create a socket in {str(self.data_folder)!r}; {_REMEDY}")
        account.take_over(folder)
        write_private(self.folder / "socket", str(folder))
        return folder

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
                fault = f"it does not answer; see {self.log}" if "timeout" in str(error) else format_error(error)
                progress(f"waiting for Postgres (process {server.pid}): {fault}")
            if waited > (_LOCK_TIMEOUT if is_stopping else _ATTACH_TIMEOUT):
                if port == SOCKET_PORT and not (folder := Path(self.get_host(port))).exists():
                    raise StorageError(
                        f"Postgres (process {server.pid}) has its socket in {str(folder)!r}, which is missing here; "
                        "another job with its own /tmp may use this home; set HPSEARCH_HOME to another folder"
                    )
                if has_answered(error) and not is_stopping:  # a restart would end connections of others, and not help
                    raise StorageError(f"Postgres (process {server.pid}): {format_error(error)} (see {self.log})")
                self.stop()
                if self.find_process() is not None:
                    raise StorageError(
                        f"Postgres (process {server.pid}) does not answer, and this user may not stop it "
                        f"({format_error(error)}); stop it as its user or as root"
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
            sockets = None if self.has_port else self._prepare_socket_folder(account)
            port = SOCKET_PORT if sockets else preferred_port or state.choose_port(None)
            if self._launch(binaries, account, port, sockets, lock, progress):
                return port
            preferred_port = None  # another process took the port
        raise StorageError(f"Postgres cannot be started on {LOOPBACK}; see {self.log}")

    def stop(self) -> int | None:
        """Disconnect the clients and stop the server; return its process id, or None if no server was running."""
        if (server := self.find_process()) is None:
            return None
        for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):  # fast shutdown, immediate shutdown, kill
            process.send_signal([server], number)
            if process.wait_for_exit([server], timeout=_STOP_TIMEOUT):
                break
        return server.pid

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
        ends = {
            "listen_addresses": "" if sockets else LOOPBACK,
            # Relative to the data directory, so that its path can have any characters.
            "unix_socket_directories": "." if sockets == self.data_folder else str(sockets or ""),
        }
        for name, value in (ends | _SETTINGS).items():
            command += ["-c", f"{name}={value}"]
        try:
            remove_stale_pid_file(self.data_folder)
            if sockets:
                (sockets / f"{_SOCKET_NAME}.lock").unlink(missing_ok=True)
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
                progress(f"waiting for Postgres (process {identity.pid}): {format_error(error)}")
            is_permanent = isinstance(error, StorageError) and not isinstance(error, ServiceUnavailableError)
            if waited > _REPORT_AFTER and is_permanent:  # such as a wrong password
                raise StorageError(f"Postgres (process {identity.pid}): {format_error(error)} (see {self.log})")
            if process.find(identity) is None:
                if not sockets and not state.is_port_free(port):
                    return False
                output = read_tail(self.log, lines=2)
                remedy = "; enlarge /dev/shm (Docker: --shm-size=1g)" if "shared memory segment" in output else ""
                raise StorageError(f"Postgres ended during its start: {output} (see {self.log}){remedy}")
            time.sleep(_POLL)
        raise StorageError(
            f"Postgres does not answer after {_START_TIMEOUT:.0f} s: {format_error(error)} (see {self.log})"
        )
