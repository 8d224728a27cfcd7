"""Connections to Postgres: engine settings, checks, and connection errors in one line."""

from __future__ import annotations

import os
import re
import shlex
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from hpsearch.redaction import redact
from hpsearch.short_lists import join_first
from hpsearch.storage.database.libpq import check_server_user, ignore_variables
from hpsearch.storage.database.retry import is_transient_connection_error
from hpsearch.storage.database.schema import (
    ALEMBIC_TABLE,
    OPTUNA_REVISION,
    OPTUNA_TABLES,
    OPTUNA_VERSION_TABLE,
    OWN_TABLES,
    PARTIAL_RESTORE_QUERY,
    REVISION,
    VERSION_TABLE,
)
from hpsearch.storage.errors import ServiceUnavailableError, StorageError, format_error
from hpsearch.storage.urls import normalise_url, redact_password

if TYPE_CHECKING:
    import sqlalchemy
    from psycopg2.extensions import connection as Connection  # noqa: N812 it is a class
    from sqlalchemy.engine import URL


# Messages about misspelt host names; the message about a temporary failure of the name resolution is another one.
_UNKNOWN_HOST = re.compile("name or service not known|nodename nor servname", re.IGNORECASE)

# The first matching pattern decides.
_EXPLANATIONS = (
    (
        "could not translate host name|name or service not known|nodename nor servname",
        "the host name {host!r} cannot be resolved; check its spelling and the network",
    ),
    (
        'database ".*" does not exist|no such database',
        "there is no database {database!r} on {where}; create it, or correct the name in the URL",
    ),
    (
        'role ".*" does not exist',
        "there is no user {user!r} on {where}; create the user, or correct the URL",
    ),
    (
        "password authentication failed|no password supplied|authentication failed|no such user",
        "Postgres at {where} rejected the password of user {user!r}; correct the password",
    ),
    (
        r"no pg_hba\.conf entry",
        "Postgres at {where} does not admit user {user!r} from this host; add the user and the host to pg_hba.conf",
    ),
    (
        "permission denied for database",
        "user {user!r} may not connect to database {database!r}; GRANT CONNECT ON DATABASE {database} TO {user}",
    ),
    (
        "too many clients|remaining connection slots|too many connections",
        "Postgres at {where} has no free connection; raise max_connections or start fewer workers",
    ),
    (
        "server closed the connection unexpectedly|expected authentication request|connection reset by peer"
        "|invalid response to ssl negotiation|unsupported frontend protocol",
        "the server at {where} is not Postgres; check host and port",
    ),
    (
        "timeout expired|timed out",
        "{where} does not answer in time; check host and port, firewalls, and that it is a Postgres server",
    ),
    (
        "connection refused|no route to host|network is unreachable|no such file or directory",
        "nothing listens at {where}; check host and port, and that Postgres runs there",
    ),
)


def make_connection_error(error: Exception, url: URL, *, setting: str) -> StorageError:
    """Return the error for a failed connection: `ServiceUnavailableError` if a retry may succeed, else `StorageError`.

    Args:
        error: error of psycopg2 or SQLAlchemy.
        url: parsed URL of the database.
        setting: name of the setting that contains the URL, for the message.
    """
    text = redact(format_error(error))
    explanation = next((found for pattern, found in _EXPLANATIONS if re.search(pattern, text, re.IGNORECASE)), None)
    # libpq prefers those of the query, which may name several servers.
    host, port = (
        ",".join(each) if isinstance(each, tuple) else each
        for each in (url.query.get("host", url.host), url.query.get("port", url.port))
    )
    message = (explanation or "cannot connect: {text}").format(
        where=f"{host or 'the local socket'}:{port or 5432}",
        host=host,
        user=url.username,
        database=url.database,
        text=text,
    )
    is_transient = is_transient_connection_error(text) and not _UNKNOWN_HOST.search(text)
    kind = ServiceUnavailableError if is_transient else StorageError
    return kind(f"{setting} {redact(url.render_as_string())}: {message}")


STARTUP_RETRY_SECONDS = 10.0  # retry time at the start of a command; short, to report a mistyped address soon

# A dead peer is detected after about 35 s (libpq parameters in seconds, tcp_user_timeout in ms). The settings of the
# server side belong to the roles (see storage.database.roles), because PgBouncer rejects `options=` in the URL.
_CLIENT_SETTINGS = {
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 20,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 35_000,
}


def make_client_settings(url: sqlalchemy.URL, *, application_name: str) -> dict[str, Any]:
    """Return hpsearch's libpq parameters for a connection, except the parameters that the URL itself contains."""
    settings = {**_CLIENT_SETTINGS, "application_name": application_name}
    return {name: value for name, value in settings.items() if name not in url.query}


def make_engine(
    url: str, *, application_name: str, pool_size: int = 2, max_overflow: int = 3, pre_ping: bool = True
) -> sqlalchemy.Engine:
    """Return an engine that tests connections before use and detects dead peers.

    The connections keep no session state, so PgBouncer in transaction mode works.

    Args:
        url: Postgres URL in any form.
        application_name: name of the connections in `pg_stat_activity`; Postgres cuts it at 63 bytes.
        pool_size: number of connections that stay open.
        max_overflow: number of additional connections while all `pool_size` connections are in use.
        pre_ping: whether to test a connection before use; callers that retry statements do not need this test.

    Raises:
        StorageError: the URL is not a Postgres URL.
    """
    import sqlalchemy as sa

    parsed = sa.make_url(normalise_url(url))
    engine = sa.create_engine(
        parsed,
        pool_size=pool_size,
        max_overflow=max_overflow,
        pool_pre_ping=pre_ping,
        isolation_level="READ COMMITTED",  # the server may have another default, with which claims would read old rows
        connect_args=make_client_settings(parsed, application_name=application_name),
    )

    @sa.event.listens_for(engine, "do_connect")
    def connect_without_variables(dialect: Any, _record: Any, arguments: Any, parameters: Any) -> Any:
        check_server_user(parsed)
        with ignore_variables(parsed), _decode_messages():
            return dialect.connect(*arguments, **parameters)

    _ENGINES.add(engine)
    return engine


def _forget_connections() -> None:
    """Let a forked process open connections of its own: on common ones, it would read results of this process."""
    for engine in list(_ENGINES):
        engine.dispose(close=False)


_ENGINES: weakref.WeakSet[sqlalchemy.Engine] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_connections)


@contextmanager
def open_autocommit(engine: sqlalchemy.Engine) -> Iterator[sqlalchemy.Connection]:
    """Yield a connection that commits each statement individually, in one round trip without BEGIN and COMMIT.

    SQLAlchemy's isolation level AUTOCOMMIT has the same effect, but sends a SET statement each time the connection
    returns to its pool.
    """
    with engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        driver.autocommit = True
        try:
            yield connection
        finally:
            if not driver.closed:
                driver.autocommit = False


@contextmanager
def _decode_messages() -> Iterator[None]:
    """Convert messages of the server in another encoding than UTF-8, which psycopg2 cannot decode, to its errors."""
    import psycopg2

    try:
        yield
    except UnicodeDecodeError as error:
        raise psycopg2.OperationalError(error.object.decode("latin-1")) from None


def connect(url: str, *, application_name: str, setting: str = "--storage-url") -> Connection:
    """Open a psycopg2 connection.

    Raises:
        StorageError: the connection failed.
    """
    import psycopg2
    from sqlalchemy.engine import make_url

    parsed = make_url(normalise_url(url, setting=setting))
    address, mark, query = parsed.set(drivername="postgresql").render_as_string(hide_password=False).partition("?")
    dsn = f"{address}{mark}{query.replace('+', '%20')}"  # libpq does not read a plus as a space
    try:
        settings = make_client_settings(parsed, application_name=application_name)
        check_server_user(parsed)
        with ignore_variables(parsed), _decode_messages():
            connection: Connection = psycopg2.connect(dsn, **settings)
    except psycopg2.Error as error:
        raise make_connection_error(error, parsed, setting=setting) from None
    return connection


@contextmanager
def open_cursor(
    url: str, *, application_name: str, setting: str = "--storage-url", autocommit: bool = False
) -> Iterator[Any]:
    """Yield a cursor on a new connection, in a transaction that is committed at the end.

    Args:
        url: URL of the database.
        application_name: name of the connection in `pg_stat_activity`.
        setting: name of the setting that contains the URL, for messages.
        autocommit: whether to commit each statement individually, without a transaction.

    Raises:
        StorageError: the connection failed.
    """
    with closing(connect(url, application_name=application_name, setting=setting)) as connection:
        connection.autocommit = autocommit
        with nullcontext() if autocommit else connection, connection.cursor() as cursor:
            yield cursor


@contextmanager
def convert_statement_errors(url: str, setting: str) -> Iterator[None]:
    """Convert errors of psycopg2 to one-line errors without passwords.

    Raises:
        ServiceUnavailableError: the connection was lost.
        StorageError: the database rejects a statement.
    """
    import psycopg2

    try:
        yield
    except psycopg2.Error as error:
        is_down = error.pgcode is None or error.pgcode.startswith(("08", "57P"))
        text = redact_password(format_error(error), url)
        raise (ServiceUnavailableError if is_down else StorageError)(f"{setting} {redact(url)}: {text}") from None


def find_database_error(
    url: str, query: str = "SELECT true", *, connect_seconds: int | None = None
) -> Exception | None:
    """Return why a connection to the database fails, or `query` does not return true; None if all is well.

    Args:
        url: URL of the database.
        query: query that returns true.
        connect_seconds: timeout of the connection in seconds, at least 2; None for the usual one.
    """
    import psycopg2
    from sqlalchemy.engine import make_url

    if connect_seconds is not None:
        timeout = {"connect_timeout": str(connect_seconds)}
        url = make_url(url).update_query_dict(timeout).render_as_string(hide_password=False)
    try:
        with open_cursor(url, application_name="hpsearch-health") as cursor:
            cursor.execute(query)
            return None if cursor.fetchone() == (True,) else StorageError(f"{query} is not true")
    except (StorageError, psycopg2.Error) as error:
        return error


def has_answered(error: Exception) -> bool:
    """Return whether the error of `find_database_error` is an answer of the server, such as a rejected password."""
    return "FATAL:" in str(error.__context__ or error)


def format_rejection_reason(error: Exception) -> str | None:
    """Return why a running server rejects connections, from the error of `find_database_error`; None if it does not."""
    answer = str(error.__context__ or error).partition("FATAL:")[2].strip()
    return None if not answer or answer.startswith("the database system is") else format_error(answer)


def check_database(url: str, *, retry_seconds: float | None = None) -> None:
    """Check that studies can be stored at `url`, without changes to the database.

    Args:
        url: URL of the database.
        retry_seconds: longest time to retry while the database is unavailable; None means `STARTUP_RETRY_SECONDS`.

    Raises:
        ServiceUnavailableError: the database does not answer, or drops connections.
        StorageError: the server cannot be reached, rejects the user, is not Postgres or is read-only, or the tables
            are missing, have another revision than this version needs, or are not writable.
    """
    from hpsearch.storage.database.retry import retrying

    retry_seconds = STARTUP_RETRY_SECONDS if retry_seconds is None else retry_seconds
    retrying(retry_seconds, also=ServiceUnavailableError)(_check_once, url)


def _check_once(url: str) -> None:
    head = f"--storage-url {redact(url)}"
    with convert_statement_errors(url, "--storage-url"), open_cursor(url, application_name="hpsearch-check") as cursor:
        cursor.execute("SELECT current_user, pg_is_in_recovery(), current_schema()")
        user, read_only, schema = cursor.fetchone()
        if read_only:
            raise StorageError(f"{head}: this Postgres server is a read-only replica; give the primary's URL")
        if schema is None:
            raise StorageError(f"{head}: user {user!r} cannot use the schema; GRANT USAGE ON SCHEMA public TO {user}")
        cursor.execute(PARTIAL_RESTORE_QUERY)
        if cursor.fetchone() == (True,):
            raise StorageError(f"{head}: a restore was interrupted; run the same 'hpsearch restore' again")
        _check_tables(cursor, user, head)
        for owner, found, needed in read_schema_revisions(cursor):
            if found != needed:
                raise StorageError(
                    f"{head}: the tables belong to another version of {owner} (schema {found}, required {needed}); "
                    "run hpsearch migrate as the owner of the database"
                )


def find_encoding_fault(cursor: Any) -> str | None:
    """Return a text, with the remedy, if the database cannot store all characters; else None."""
    encoding = cursor.connection.info.parameter_status("server_encoding")
    if encoding in {None, "UTF8"}:  # a pooler may not report it
        return None
    return f"the database has the encoding {encoding}; create one with: ENCODING 'UTF8' TEMPLATE template0"


def read_table_privileges(cursor: Any) -> list[tuple[str, bool, list[str]]]:
    """Return, per table that workers use: its name, whether the table is missing, and the privileges the user lacks."""
    cursor.execute(
        """
        SELECT name, to_regclass(quote_ident(name)) IS NULL,
               CASE WHEN to_regclass(quote_ident(name)) IS NULL THEN ARRAY[]::text[] ELSE
               ARRAY(SELECT right_ FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS right_
                     WHERE (right_ = 'SELECT' OR name <> %s)
                       AND NOT has_table_privilege(to_regclass(quote_ident(name)), right_)) END
        FROM unnest(%s) AS name
        """,
        (OPTUNA_VERSION_TABLE, [*OPTUNA_TABLES, *OWN_TABLES]),
    )
    return [tuple(row) for row in cursor.fetchall()]


def read_schema_revisions(cursor: Any) -> list[tuple[str, str | None, str]]:
    """Return, for Optuna and for hpsearch: name, revision of the tables (None if missing), and required revision."""
    return [
        ("Optuna", read_revision(cursor, ALEMBIC_TABLE), OPTUNA_REVISION),
        ("hpsearch", read_revision(cursor, VERSION_TABLE), REVISION),
    ]


def read_revision(cursor: Any, table: str) -> str | None:
    """Return the schema revision in a version table of Alembic; None if the table or the revision is missing."""
    if not has_table(cursor, table):
        return None
    cursor.execute(f"SELECT version_num FROM {table}")  # noqa: S608 a constant name
    return next((str(revision) for (revision,) in cursor), None)


def has_table(cursor: Any, table: str) -> bool:
    """Return whether a table of this name is visible to the user."""
    cursor.execute("SELECT to_regclass(%s) IS NOT NULL", (table,))
    return bool(cursor.fetchone()[0])


def _check_tables(cursor: Any, user: str, head: str) -> None:
    rows = read_table_privileges(cursor)
    if all(is_missing for _, is_missing, _ in rows):
        raise StorageError(f"{head}: the tables do not exist; run hpsearch migrate as the owner of the database")
    if missing := ", ".join(name for name, is_missing, _ in rows if is_missing):
        raise StorageError(f"{head}: tables are missing ({missing}); run hpsearch migrate as the database's owner")
    if lacking := ", ".join(sorted({right for *_, rights in rows for right in rights})):
        tables = [name for name, _, rights in rows if rights]
        raise StorageError(
            f"{head}: user {user!r} lacks {lacking} on {join_first(tables)}; run "
            f"hpsearch migrate --worker-role {shlex.quote(user)} as the owner of the database"
        )
