"""The data directory of the embedded Postgres: its creation, version, password, pid file and lock."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import subprocess
import tempfile
from pathlib import Path

import psutil

from hpsearch.host_name import get_host_name
from hpsearch.storage.embedded.postgres_account import Account, find_setup_account
from hpsearch.storage.embedded.postgres_binaries import Binaries
from hpsearch.storage.errors import StorageError
from hpsearch.storage.files import write_private
from hpsearch.storage.home import read_own_text

SUPERUSER = "postgres"
_LONGEST_FOLDER_BYTES = 900  # Postgres limits the paths of its files to 1023 bytes
REMEDY = "set HPSEARCH_HOME to another folder"
_KEPT_VARIABLES = ("PATH", "TMPDIR", "TZ", "LD_", "DYLD_", "NSS_WRAPPER_")  # beginnings of names


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
        raise StorageError(f"{str(path)!r}, the password of Postgres, is missing; restore it, or {REMEDY}") from None


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
    raise StorageError(f"{str(data)!r} is not a Postgres data directory (no PG_VERSION); move it away, or {REMEDY}")


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
