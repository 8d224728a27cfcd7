"""The data directory of the embedded Postgres: made, checked, and kept to one server at a time."""

from __future__ import annotations

import fcntl
import os
import platform
import secrets
import shutil
import subprocess
import tempfile
from pathlib import Path

import psutil

from hpsearch.storage.embedded.postgres_account import Account
from hpsearch.storage.embedded.postgres_binaries import Binaries
from hpsearch.storage.errors import StorageError
from hpsearch.storage.files import write_private

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
    workshop = Path(tempfile.mkdtemp(prefix="initdb-", dir=folder))
    try:
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
    finally:
        shutil.rmtree(workshop, ignore_errors=True)


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
