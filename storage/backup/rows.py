"""Restore of the rows of a dump, without running its SQL.

The author of a dump can put any statement into it: functions, triggers and defaults, but also forged statements in the
entries of the tables' rows. Postgres would run them as the owner of the database, and psql could run shell commands
(CVE-2025-8714). Therefore hpsearch creates the tables itself, and takes only rows and counters from a dump.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, BinaryIO

from hpsearch.storage.backup.dumps import open_session, run_program
from hpsearch.storage.database.schema import OPTUNA_VERSION_TABLE, REVISION_TABLES
from hpsearch.storage.embedded.postgres_binaries import Binaries
from hpsearch.storage.errors import StorageError, format_error

# Tables that the migrations fill; their rows are not restored.
_MIGRATED_TABLES = (*REVISION_TABLES, OPTUNA_VERSION_TABLE)


@dataclass(frozen=True)
class TableRows:
    """Rows of a table in a script of pg_restore.

    Attributes:
        table: name of the table, without its schema.
        columns: names of the columns, in the order of the values.
        start, end: offsets of the first row and of the end of the last row, in bytes.
    """

    table: str
    columns: tuple[str, ...]
    start: int
    end: int


@dataclass(frozen=True)
class DumpedRows:
    """Rows and counters of a dump.

    Attributes:
        script: file with the rows, in the text format of COPY.
        tables: rows per table.
        counters: name of a sequence, without its schema, to its last value.
        encoding: encoding of the file, by its name in Postgres.
    """

    script: Path
    tables: Sequence[TableRows]
    counters: dict[str, int]
    encoding: str


def restore_rows(
    dump: Path,
    database: tuple[str, str],
    *,
    create_tables: Callable[[], None],
    must_be_empty: Sequence[str],
    programs: Binaries,
    adapt: Callable[[Any], None] = lambda _: None,
) -> list[str]:
    """Replace the content of a database with new tables and the rows of a dump.

    Args:
        dump: dump file in a private folder; a script with the rows is written to the same folder.
        database: URL of the database, with the role that will own the tables, and the setting that contains the URL.
        create_tables: creates the tables of the dump's revision in the cleared database.
        must_be_empty: tables that must not contain any row.
        programs: Postgres installation, at least as new as the installation that wrote the dump.
        adapt: changes the rows, by a cursor, before they are committed.

    Returns:
        Names of the tables in the dump that have rows, and that `create_tables` did not create; they are not restored.

    Raises:
        StorageError: a table is not empty, or the dump is damaged (the database is unchanged in these cases), or
            Postgres rejects a row.
    """
    import psycopg2

    script = dump.with_name("rows.sql")
    run_program(programs, "pg_restore", "--format=custom", "--data-only", f"--file={script}", dump)
    rows = find_rows(script)
    with open_session(*database) as cursor:
        cursor.execute(_CLEAR.format(checks="".join(_REJECT_ROWS.format(table=table) for table in must_be_empty)))
    create_tables()
    with open_session(*database) as cursor:
        try:
            left_out = _load(cursor, rows)
            adapt(cursor)
        except (psycopg2.DataError, psycopg2.IntegrityError) as error:
            raise StorageError(f"the backup is damaged ({format_error(error)}); give another backup") from None
    return left_out


_COPY = re.compile(rb"COPY \S+?\.(\S+) \((.+)\) FROM stdin;\n")
_COUNTER = re.compile(rb"SELECT pg_catalog\.setval\('[^.']+\.([^.']+)', (\d{1,19}), (true|false)\);\n")
_ENCODING = re.compile(rb"SET client_encoding = '(\w+)';\n")
_END = b"\\.\n"


def find_rows(script: Path) -> DumpedRows:
    """Find the rows and counters in a script of pg_restore; all other statements are ignored.

    Raises:
        StorageError: the rows of a table have no end, or a table occurs twice.
    """
    tables: dict[str, TableRows] = {}
    counters: dict[str, int] = {}
    encoding = "UTF8"
    with script.open("rb") as file:
        while line := file.readline():
            if found := _COPY.fullmatch(line):
                table, columns = _unquote(found[1]), tuple(_unquote(name) for name in found[2].split(b", "))
                start = file.tell()
                while (row := file.readline()) not in (_END, b""):
                    pass
                if not row or table in tables:
                    fault = "occurs twice" if row else "has no end"
                    raise StorageError(f"the backup is damaged (the table {table!r} {fault}); give another backup")
                tables[table] = TableRows(table, columns, start, file.tell() - len(row))
            elif found := _COUNTER.fullmatch(line):
                counters[_unquote(found[1])] = int(found[2]) - (found[3] == b"false")
            elif found := _ENCODING.fullmatch(line):
                encoding = found[1].decode()
    return DumpedRows(script, list(tables.values()), counters, encoding)


def _unquote(name: bytes) -> str:
    return name.decode(errors="replace").strip('"')


class _Section:
    """Reader of a part of a file."""

    def __init__(self, file: BinaryIO, start: int, end: int) -> None:
        file.seek(start)
        self._file, self._remaining = file, end - start

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(self._remaining if size < 0 else min(size, self._remaining))
        self._remaining -= len(data)
        return data


def _load(cursor: Any, rows: DumpedRows) -> list[str]:
    """Load rows into the tables of the current schema, and return the names of the other tables that have rows."""
    from psycopg2 import sql

    for timeout in ("statement_timeout", "idle_in_transaction_session_timeout"):
        cursor.execute(f"SET LOCAL {timeout} = 0")
    cursor.execute(_COLUMNS, (list(_MIGRATED_TABLES),))
    columns: dict[str, list[str]] = dict(cursor.fetchall())
    cursor.execute(_REFERENCES)
    references: dict[str, list[str]] = dict(cursor.fetchall())
    # Migrations create some rows, for example the default workspace of MLflow.
    cursor.execute(sql.SQL("TRUNCATE {}").format(sql.SQL(", ").join(map(sql.Identifier, columns))))
    # The dump has the rows that hpsearch's triggers have written. Foreign keys are not among the triggers of USER.
    _alter_tables(cursor, columns, "DISABLE TRIGGER USER")
    found = {each.table: each for each in rows.tables}
    with rows.script.open("rb") as file:
        for table in TopologicalSorter({name: references.get(name, ()) for name in columns}).static_order():
            if table in found:
                _copy(cursor, found[table], columns[table], file, rows.encoding)
    _alter_tables(cursor, columns, "ENABLE TRIGGER USER")
    _set_counters(cursor, rows.counters)
    return [name for name, each in found.items() if name not in (*columns, *_MIGRATED_TABLES) and each.end > each.start]


def _alter_tables(cursor: Any, tables: Iterable[str], action: str) -> None:
    from psycopg2 import sql

    for table in tables:
        cursor.execute(sql.SQL(f"ALTER TABLE {{}} {action}").format(sql.Identifier(table)))


def _copy(cursor: Any, rows: TableRows, columns: Sequence[str], file: BinaryIO, encoding: str) -> None:
    from psycopg2 import sql

    if unknown := sorted(set(rows.columns) - set(columns)):
        fault = f"the table {rows.table!r} has no column {unknown[0]!r}"
        raise StorageError(f"the backup is damaged ({fault}); give another backup")
    names = sql.SQL(", ").join(map(sql.Identifier, rows.columns))
    statement = sql.SQL("COPY {} ({}) FROM STDIN WITH (ENCODING {})")
    cursor.copy_expert(
        statement.format(sql.Identifier(rows.table), names, sql.Literal(encoding)), _Section(file, rows.start, rows.end)
    )


def _set_counters(cursor: Any, counters: dict[str, int]) -> None:
    """Set the sequences of all columns to their last values in the dump, and at least to the largest stored values."""
    from psycopg2 import sql

    statement = sql.SQL("SELECT setval({}, last) FROM (SELECT greatest(max({}), {}) AS last FROM {}) t WHERE last > 0")
    cursor.execute(_SEQUENCES)
    for name, table, column in cursor.fetchall():
        sequence, last = sql.Literal(f'"{name}"'), sql.Literal(counters.get(name, 0))
        cursor.execute(statement.format(sequence, sql.Identifier(column), last, sql.Identifier(table)))


# Tables of the current schema, with their columns.
_COLUMNS = """
    SELECT c.relname::text, array_agg(a.attname::text)
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
      JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
     WHERE n.nspname = current_schema() AND c.relkind IN ('r', 'p') AND c.relname <> ALL (%s)
     GROUP BY c.oid
"""

# Tables whose foreign keys refer to other tables, with these tables.
_REFERENCES = """
    SELECT c.relname::text, array_agg(r.relname::text)
      FROM pg_constraint f JOIN pg_class c ON c.oid = f.conrelid JOIN pg_class r ON r.oid = f.confrelid
      JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE n.nspname = current_schema() AND f.contype = 'f' AND f.conrelid <> f.confrelid
     GROUP BY c.oid
"""

# Sequences of columns.
_SEQUENCES = """
    SELECT s.relname, c.relname, a.attname
      FROM pg_class s JOIN pg_namespace n ON n.oid = s.relnamespace
      JOIN pg_depend d ON d.classid = 'pg_class'::regclass::oid AND d.objid = s.oid AND d.deptype IN ('a', 'i')
      JOIN pg_class c ON d.refclassid = 'pg_class'::regclass::oid AND c.oid = d.refobjid
      JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = d.refobjsubid
     WHERE n.nspname = current_schema() AND s.relkind = 'S'
"""

_REJECT_ROWS = """
    IF to_regclass('{table}') IS NOT NULL THEN
        LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE;
        IF EXISTS (SELECT FROM {table}) THEN
            RAISE EXCEPTION 'table {table} is not empty any more';
        END IF;
    END IF;
"""

# Relations of the current schema that are not indexes, and do not belong to a table or an extension.
_RELATIONS = """
    SELECT c.relname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE n.nspname = current_schema() AND c.relkind IN ('r', 'p', 'v', 'm', 'f', 'S')
       AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.classid = 'pg_class'::regclass::oid AND d.objid = c.oid
                                                 AND d.deptype IN ('a', 'e', 'i'))
     ORDER BY c.relname
"""


def find_other_relations(cursor: Any, known: Container[str]) -> list[str]:
    """Return the names of the tables, views and sequences that are not in `known`."""
    cursor.execute(_RELATIONS)
    return [name for (name,) in cursor.fetchall() if name not in known]


# Types and functions of other programs and of extensions remain. Objects of a column are dropped with the table.
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
                   format('%I.%I', n.nspname, c.relname) AS name, c.oid, 'pg_class'::regclass::oid AS catalog
              FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
             WHERE n.nspname = current_schema() AND c.relkind IN ('r', 'p', 'v', 'm', 'S')
            UNION ALL
            SELECT 'TYPE', format('%I.%I', n.nspname, t.typname), t.oid, 'pg_type'::regclass::oid
              FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace
             WHERE n.nspname = current_schema() AND t.typname ~ '^(study|trial)[a-z]+$' AND t.typtype = 'e'
            UNION ALL
            SELECT 'ROUTINE', p.oid::regprocedure::text, p.oid, 'pg_proc'::regclass::oid
              FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
             WHERE n.nspname = current_schema() AND p.proname ~ '^(hpsearch_.*|prevent_secrets_aad_mutation)$'
        ) AS found
         WHERE NOT EXISTS (SELECT FROM pg_depend d
                            WHERE d.classid = found.catalog AND d.objid = found.oid AND d.deptype IN ('e', 'i'))
    LOOP
        EXECUTE statement;
    END LOOP;
END $clear$;
"""
