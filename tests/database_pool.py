"""Databases that tests use one after another: emptied between two tests, since a new one takes 40 ms of a core.

A database whose schema or privileges a test changed is not used again. Each test sees a new name, so that what an
earlier test left running cannot connect.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import psycopg2
import psycopg2.errors
from psycopg2 import sql
from psycopg2.extensions import cursor as Cursor  # noqa: N812 it is a class

MANY_ROWS = 1000  # more dead rows would slow the next test down

# Each row of a catalog has the number of the transaction that wrote it. A copy of a database has the same numbers.
_CATALOGS = (
    *("pg_class", "pg_attribute", "pg_attrdef", "pg_constraint", "pg_proc", "pg_trigger", "pg_type", "pg_namespace"),
    *("pg_default_acl", "pg_policy", "pg_extension", "pg_rewrite", "pg_event_trigger", "pg_largeobject_metadata"),
)
_STATE = " UNION ALL ".join(f"SELECT count(*), max(xmin::text::bigint) FROM {name}" for name in _CATALOGS)
_STATE += """
    UNION ALL SELECT count(*), null FROM pg_db_role_setting s JOIN pg_database d ON d.oid = s.setdatabase
     WHERE d.datname = current_database()
    UNION ALL SELECT count(*), null FROM pg_database
     WHERE datname = current_database() AND datconnlimit = -1 AND datallowconn AND datacl IS NULL
"""
_END_OTHER_SESSIONS = """
    SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity
     WHERE datname = current_database() AND pid <> pg_backend_pid()
"""


@dataclass
class Pool:
    """The databases of one process that no test uses at the moment.

    Args:
        url_of: returns the superuser's URL of a database.
        template: the database that all are copies of.
        owner: of the databases.
    """

    url_of: Callable[[str], str]
    template: str
    owner: str
    _free: list[str] = field(default_factory=list)
    _state: list[tuple[int, int]] = field(default_factory=list)
    _filled: list[str] = field(default_factory=list)
    _rows: list[tuple[int, int]] = field(default_factory=list)
    _empty: list[str] = field(default_factory=list)

    def take(self, name: str, *, new: bool) -> None:
        """Give an unused database this name, or create one.

        Args:
            new: create one. Dead rows of earlier tests change the plans of queries.
        """
        if self._free and not new:
            statement, before = sql.SQL("ALTER DATABASE {1} RENAME TO {0}"), self._free.pop()
            with suppress(psycopg2.errors.ObjectInUse):  # what an earlier test left running has connected again
                self._run("postgres", statement.format(sql.Identifier(name), sql.Identifier(before)))
                return
        statement = sql.SQL("CREATE DATABASE {} OWNER {} TEMPLATE {} STRATEGY file_copy")
        self._run("postgres", statement.format(*map(sql.Identifier, (name, self.owner, self.template))))
        if not self._state:
            self._run(name, self._read_first)

    def give_back(self, name: str) -> None:
        """Empty a database for the next test, or drop it."""
        if self._is_emptied(name):
            self._free.append(name)
        else:
            self._run("postgres", sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))

    def _is_emptied(self, name: str) -> bool:
        empty = False

        def clear(cursor: Cursor) -> None:
            nonlocal empty
            cursor.execute(_END_OTHER_SESSIONS)
            if _read_state(cursor) != self._state or _read_rows(cursor, self._filled) != self._rows:
                return
            cursor.execute("SET session_replication_role = replica")  # no triggers and no foreign keys
            n_rows = 0
            for table in self._empty:
                cursor.execute(sql.SQL("DELETE FROM {}").format(sql.Identifier(table)))
                n_rows += cursor.rowcount
            cursor.execute("SELECT setval(seqrelid, seqstart, false) FROM pg_sequence")
            empty = n_rows < MANY_ROWS

        self._run(name, clear)
        return empty

    def _read_first(self, cursor: Cursor) -> None:
        cursor.execute("SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace")
        for (table,) in cursor.fetchall():
            cursor.execute(sql.SQL("SELECT FROM {} LIMIT 1").format(sql.Identifier(table)))
            (self._filled if cursor.rowcount else self._empty).append(table)
        self._state, self._rows = _read_state(cursor), _read_rows(cursor, self._filled)

    def _run(self, database: str, action: sql.Composed | Callable[[Cursor], None]) -> None:
        connection = psycopg2.connect(self.url_of(database))
        connection.autocommit = True
        try:
            with connection.cursor() as cursor:
                if callable(action):
                    action(cursor)
                else:
                    cursor.execute(action)
        finally:
            connection.close()


def _read_state(cursor: Cursor) -> list[tuple[int, int]]:
    """Return numbers that change with the schema and the privileges of a database."""
    cursor.execute(_STATE)
    return cursor.fetchall()


def _read_rows(cursor: Cursor, tables: list[str]) -> list[tuple[int, int]]:
    """Return numbers that change with the rows of tables."""
    selects = [sql.SQL("SELECT count(*), max(xmin::text::bigint) FROM {}").format(sql.Identifier(t)) for t in tables]
    cursor.execute(sql.SQL(" UNION ALL ").join(selects))
    return cursor.fetchall()
