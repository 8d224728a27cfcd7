"""The study database: whether it answers, has the tables and the rights, what its clock says, who else is connected."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from hpsearch.search.console import command, counted
from hpsearch.search.doctor.checks import Checks, Finding
from hpsearch.storage.database.connect import open_cursor, schema_revisions, table_rights

ROUND_TRIPS = 5
SKEW = 2.0  # seconds that two clocks may differ
FEW_CONNECTIONS = 5  # what one worker may have open at a time

# The sequences that number the rows of the tables. CASE: WHERE alone may ask for the rights on what is none.
_SEQUENCES = """
    SELECT s.relname FROM pg_depend d JOIN pg_class s ON s.oid = d.objid
     WHERE d.refobjid = ANY (SELECT to_regclass(quote_ident(name))::oid FROM unnest(%s) AS name)
       AND CASE WHEN s.relkind = 'S' THEN NOT has_sequence_privilege(s.oid, 'USAGE') ELSE false END
     ORDER BY 1
"""
_CONNECTIONS = """
    SELECT current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
           - coalesce(current_setting('reserved_connections', true)::int, 0),
           (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend')
"""


def ask_database(look: Callable[[Any], Finding], url: str, setting: str) -> Finding:
    """Return the finding of one of `DATABASE_CHECKS` about the database at `url`, which was given by `setting`."""
    with open_cursor(url, application_name="hpsearch doctor", setting=setting, autocommit=True) as cursor:
        return look(cursor)


def _answers(cursor: Any) -> Finding:
    cursor.execute(
        "SELECT current_setting('server_version'), pg_is_in_recovery(), current_user, current_database(), "
        "current_schema()"
    )
    server, read_only, user, database, schema = cursor.fetchone()
    info = cursor.connection.info
    where = f"Postgres {server.split()[0]} at {info.host or 'the local socket'}:{info.port}"
    if read_only:
        return Finding("failed", f"{where} is a read-only replica", "give the primary's URL")
    if schema is None:
        grant = f"GRANT USAGE ON SCHEMA public TO {user}"
        return Finding("failed", f"{where}: user {user!r} lacks rights on the schema of database {database!r}", grant)
    laps = []
    for _ in range(ROUND_TRIPS):
        began = time.perf_counter()
        cursor.execute("SELECT 1")
        laps.append(time.perf_counter() - began)
    trip = 1000 * statistics.median(laps)
    return Finding("ok", f"{where}, database {database}, user {user}: {trip:.1f} ms a round trip")


def _schema(cursor: Any) -> Finding:
    migrate = f"run '{command('migrate')}' as the owner of the database"
    rows = table_rights(cursor)
    if missing := [name for name, is_missing, _ in rows if is_missing]:
        all_missing = len(missing) == len(rows)
        said = "there are no tables yet" if all_missing else f"tables are missing: {', '.join(missing)}"
        return Finding("failed", said, migrate)
    revisions = schema_revisions(cursor)
    for owner, found, needed in revisions:
        if found != needed:
            other = f"the tables are of another version of {owner}: {found}, this release needs {needed}"
            return Finding("failed", other, migrate)
    shown = ", ".join(f"{owner} {found}" for owner, found, _ in revisions)
    return Finding("ok", f"the tables are of this release ({shown})")


def _rights(cursor: Any) -> Finding:
    user, rows = cursor.connection.info.user, table_rights(cursor)
    if tables := [name for name, _, lacking in rows if lacking]:
        rights = ", ".join(sorted({right for *_, lacking in rows for right in lacking}))
        grant = f"as the owner: GRANT {rights} ON {', '.join(tables)} TO {user}"
        return Finding("failed", f"user {user!r} lacks {rights} on {_some(tables)}", grant)
    cursor.execute(_SEQUENCES, ([name for name, *_ in rows],))
    if sequences := [name for (name,) in cursor.fetchall()]:
        grant = f"as the owner: GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {user}"
        return Finding("failed", f"user {user!r} lacks USAGE on {_some(sequences)}", grant)
    return Finding("ok", f"user {user} may read and write rows of all {len(rows)} tables")


def _clock(cursor: Any) -> Finding:
    began = time.time()
    cursor.execute("SELECT extract(epoch FROM clock_timestamp())")
    there = float(cursor.fetchone()[0])
    ahead = (began + time.time()) / 2 - there  # the reply was written about half-way
    if abs(ahead) <= SKEW:
        return Finding("ok", f"{abs(ahead):.2f} s from the database's")
    which = "ahead of" if ahead > 0 else "behind"
    return Finding(
        "warning",
        f"this machine's is {abs(ahead):.1f} s {which} the database's; leases go by the database's, so that only the "
        "times in logs are off",
        "set it by NTP",
    )


def _connections(cursor: Any) -> Finding:
    cursor.execute(_CONNECTIONS)
    most, used = cursor.fetchone()
    left = max(0, most - used)
    said = f"{left} of {most} left"
    if left >= FEW_CONNECTIONS:
        return Finding("ok", said)
    remedy = "raise max_connections, or put PgBouncer before the database"
    return Finding("warning", f"{said}; a worker has up to {FEW_CONNECTIONS}", remedy)


DATABASE_CHECKS: Checks = (
    ("database", _answers, "services"),
    ("schema", _schema, "database"),
    ("rights", _rights, "schema"),
    ("clock", _clock, "database"),
    ("connections", _connections, "database"),
)


def _some(names: list[str], most: int = 3) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {counted(more, 'other')}" if more > 0 else "")
