"""The checks of the study database: connection, tables, permissions, clock and free connections."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from hpsearch.search.console import format_command
from hpsearch.search.doctor.checks import Checks, Finding
from hpsearch.short_lists import join_first
from hpsearch.storage.database.connect import (
    find_encoding_fault,
    open_cursor,
    read_schema_revisions,
    read_table_privileges,
)

ROUND_TRIPS = 5
MAX_CLOCK_SKEW_SECONDS = 2.0
CONNECTIONS_PER_WORKER = 5  # at most

# The sequences of the tables that the user may not use. CASE, because WHERE may evaluate the privilege of a relation
# that is not a sequence, which is an error.
_FIND_LOCKED_SEQUENCES = """
    SELECT s.relname FROM pg_depend d JOIN pg_class s ON s.oid = d.objid
     WHERE d.refobjid = ANY (SELECT to_regclass(quote_ident(name))::oid FROM unnest(%s) AS name)
       AND CASE WHEN s.relkind = 'S' THEN NOT has_sequence_privilege(s.oid, 'USAGE') ELSE false END
     ORDER BY 1
"""
_COUNT_CONNECTIONS = """
    SELECT current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
           - coalesce(current_setting('reserved_connections', true)::int, 0),
           (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend')
"""


def run_database_check(look: Callable[[Any], Finding], url: str, setting: str) -> Finding:
    """Run one of `DATABASE_CHECKS` on the database at `url`. Error messages name `setting`, the source of the URL."""
    with open_cursor(url, application_name="hpsearch doctor", setting=setting, autocommit=True) as cursor:
        return look(cursor)


def _check_connection(cursor: Any) -> Finding:
    cursor.execute(
        "SELECT current_setting('server_version'), pg_is_in_recovery(), current_user, current_database(), "
        "current_schema()"
    )
    server, read_only, user, database, schema = cursor.fetchone()
    info = cursor.connection.info
    where = f"Postgres {server.split()[0]} at {info.host or 'the local socket'}:{info.port}"
    if read_only:
        return Finding("failed", f"{where} is a read-only replica", "give the URL of the primary server")
    if fault := find_encoding_fault(cursor):
        return Finding("warning", f"{where}: {fault.partition('; ')[0]}", fault.partition("; ")[2])
    if schema is None:
        grant = f"run as the owner: GRANT USAGE ON SCHEMA public TO {user}"
        return Finding("failed", f"{where}: user {user!r} cannot use the schema of database {database!r}", grant)
    laps = []
    for _ in range(ROUND_TRIPS):
        began = time.perf_counter()
        cursor.execute("SELECT 1")
        laps.append(time.perf_counter() - began)
    trip = 1000 * statistics.median(laps)
    return Finding("ok", f"{where}, database {database}, user {user}: round trip {trip:.1f} ms")


def _check_schema(cursor: Any) -> Finding:
    migrate = f"run '{format_command('migrate')}' as the owner of the database"
    rows = read_table_privileges(cursor)
    if missing := [name for name, is_missing, _ in rows if is_missing]:
        all_missing = len(missing) == len(rows)
        text = "the database has no hpsearch tables yet" if all_missing else f"tables are missing: {', '.join(missing)}"
        return Finding("failed", text, migrate)
    revisions = read_schema_revisions(cursor)
    for owner, found, needed in revisions:
        if found != needed:
            other = f"the database schema has revision {found} of {owner}, but this release needs revision {needed}"
            return Finding("failed", other, migrate)
    shown = ", ".join(f"{owner} {found}" for owner, found, _ in revisions)
    return Finding("ok", f"the tables match this release of hpsearch ({shown})")


def _check_permissions(cursor: Any) -> Finding:
    user, rows = cursor.connection.info.user, read_table_privileges(cursor)
    if tables := [name for name, _, lacking in rows if lacking]:
        rights = ", ".join(sorted({right for *_, lacking in rows for right in lacking}))
        grant = f"run as the owner: GRANT {rights} ON {', '.join(tables)} TO {user}"
        return Finding("failed", f"user {user!r} lacks {rights} on the tables {join_first(tables)}", grant)
    cursor.execute(_FIND_LOCKED_SEQUENCES, ([name for name, *_ in rows],))
    if sequences := [name for (name,) in cursor.fetchall()]:
        grant = f"run as the owner: GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {user}"
        return Finding("failed", f"user {user!r} lacks USAGE on the sequences {join_first(sequences)}", grant)
    return Finding("ok", f"user {user!r} may read and write all {len(rows)} tables")


def _check_clock(cursor: Any) -> Finding:
    began = time.time()
    cursor.execute("SELECT extract(epoch FROM clock_timestamp())")
    there = float(cursor.fetchone()[0])
    ahead = (began + time.time()) / 2 - there  # assumes that the server read its clock in the middle of the round trip
    if abs(ahead) <= MAX_CLOCK_SKEW_SECONDS:
        return Finding("ok", f"this machine's clock differs from the database's by {abs(ahead):.2f} s")
    which = "ahead of" if ahead > 0 else "behind"
    return Finding(
        "warning",
        f"this machine's clock is {abs(ahead):.1f} s {which} the database's; leases use the database's clock, so only "
        "times in logs are wrong",
        "synchronize the clock with NTP",
    )


def _check_connections(cursor: Any) -> Finding:
    cursor.execute(_COUNT_CONNECTIONS)
    most, used = cursor.fetchone()
    left = max(0, most - used)
    text = f"{left} of {most} database connections are free"
    if left >= CONNECTIONS_PER_WORKER:
        return Finding("ok", text)
    remedy = "raise max_connections of Postgres, or connect through PgBouncer"
    return Finding("warning", f"{text}; a worker uses up to {CONNECTIONS_PER_WORKER}", remedy)


DATABASE_CHECKS: Checks = (
    ("database", _check_connection, "services"),
    ("schema", _check_schema, "database"),
    ("rights", _check_permissions, "schema"),
    ("clock", _check_clock, "database"),
    ("connections", _check_connections, "database"),
)
