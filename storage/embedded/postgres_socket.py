"""The Unix socket of the embedded Postgres: the folder in which clients can use it.

On a port of the loopback address, another user could intercept connections with sockets that were bound to the port
before the server listened. So the server listens only on a socket, in its data directory or in a private folder.
"""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from hpsearch.storage.embedded.data_directory import REMEDY
from hpsearch.storage.embedded.postgres_account import Account
from hpsearch.storage.errors import StorageError
from hpsearch.storage.files import write_private
from hpsearch.storage.home import read_own_text
from hpsearch.storage.sockets import PlainSocket

SOCKET_PORT = 5432  # in the name of the socket
SOCKET_NAME = f".s.PGSQL.{SOCKET_PORT}"
_LONGEST_SOCKET_PATH = 107  # bytes
_TEMPORARY_FOLDER = "/tmp"  # noqa: S108 for a private folder; TMPDIR may have a long path


def find_socket_folder(folder: Path) -> Path:
    """Return the folder of the socket of the server in `folder`: `folder/data`, or the one that `folder/socket` names.

    Raises:
        OSError: the file `socket` belongs to another user.
    """
    try:
        return Path(read_own_text(folder / "socket"))
    except FileNotFoundError:
        return folder / "data"


def prepare_socket_folder(folder: Path, account: Account) -> Path:
    """Return the folder of the socket: the data directory, or a private temporary folder if its path is too long.

    Args:
        folder: folder with the data directory `data`; its file `socket` names a temporary folder.
        account: account of the server.

    Raises:
        StorageError: no folder can have a socket.
    """
    data, record = folder / "data", folder / "socket"
    if (sockets := find_socket_folder(folder)) != data:
        with suppress(OSError):  # it exists
            sockets.mkdir(0o700)  # the same path, which is in the URLs of waiting workers
            account.take_over(sockets)
        if _is_private(sockets, account.uid) and _can_have_socket(sockets):
            return sockets
    record.unlink(missing_ok=True)
    if _can_have_socket(data):
        return data
    sockets = Path(tempfile.mkdtemp(prefix="hpsearch-pg-", dir=_TEMPORARY_FOLDER))
    if not _can_have_socket(sockets):
        sockets.rmdir()
        raise StorageError(f"Postgres cannot create a socket in {str(data)!r}; {REMEDY}")
    account.take_over(sockets)
    write_private(record, str(sockets))
    return sockets


def remove_socket_folder(folder: Path, uid: int) -> None:
    """Remove the temporary folder that `prepare_socket_folder` has created for a server of `uid`, which has ended."""
    sockets = find_socket_folder(folder)
    if sockets != folder / "data" and _is_private(sockets, uid):
        for name in (SOCKET_NAME, f"{SOCKET_NAME}.lock"):  # a killed server leaves them
            (sockets / name).unlink(missing_ok=True)
        with suppress(OSError):  # not empty
            sockets.rmdir()


def _is_private(folder: Path, uid: int) -> bool:
    """Return whether a folder exists and only the user `uid` can use it."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o700 and status.st_uid == uid


def _can_have_socket(folder: Path) -> bool:
    """Return whether clients can use a socket in a folder."""
    path = folder / SOCKET_NAME
    if len(os.fsencode(path)) > _LONGEST_SOCKET_PATH or "," in str(path):  # libpq splits the path at commas
        return False
    probe = folder / ".s.PGSQL.test"
    try:
        with PlainSocket(socket.AF_UNIX) as listener, PlainSocket(socket.AF_UNIX) as client:
            probe.unlink(missing_ok=True)
            listener.bind(os.fsencode(probe))
            probe.chmod(0o700)
            listener.listen()
            client.connect(os.fsencode(probe))
            probe.unlink()
    except OSError:  # such as a file system without sockets
        return False
    return True
