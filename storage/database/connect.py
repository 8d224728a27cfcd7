"""Connect to Postgres: engine settings, checks, and one-line connection errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from hpsearch.storage.database.retry import may_pass
from hpsearch.storage.database.schema import (
    ALEMBIC_TABLE,
    IS_RESTORED_BY_HALF,
    OPTUNA_REVISION,
    OPTUNA_TABLES,
    OUR_TABLES,
    REVISION,
    VERSION_TABLE,
)
from hpsearch.storage.errors import AwayError, StorageError, one_line
from hpsearch.storage.urls import normalise, redact, without_secret

if TYPE_CHECKING:
    import sqlalchemy
    from psycopg2.extensions import connection as Connection  # noqa: N812 it is a class
    from sqlalchemy.engine import URL


# A name that is misspelt; one that cannot be looked up now is another thing.
_UNKNOWN = re.compile("name or service not known|nodename nor servname", re.IGNORECASE)

# The first pattern found in the text decides.
_MEANINGS = (
    (
        "could not translate host name|name or service not known|nodename nor servname",
        "the host {host!r} is not known: check its spelling and the network",
    ),
    (
        'database ".*" does not exist|no such database',
        "there is no database {database!r} on {where}: create it, or correct the name in the URL",
    ),
    (
        'role ".*" does not exist',
        "there is no user {user!r} on {where}: create it, or correct the URL",
    ),
    (
        "password authentication failed|no password supplied|authentication failed|no such user",
        "Postgres at {where} refused the password of user {user!r}: correct the URL",
    ),
    (
        r"no pg_hba\.conf entry",
        "Postgres at {where} does not let user {user!r} in from here: allow it in pg_hba.conf",
    ),
    (
        "permission denied for database",
        "user {user!r} may not connect to database {database!r}: GRANT CONNECT ON DATABASE {database} TO {user}",
    ),
    (
        "too many clients|remaining connection slots|too many connections",
        "Postgres at {where} has no free connection: raise max_connections or start fewer workers",
    ),
    (
        "server closed the connection unexpectedly|expected authentication request|connection reset by peer"
        "|invalid response to ssl negotiation|unsupported frontend protocol",
        "what answers at {where} is not a Postgres server: check host and port",
    ),
    (
        "timeout expired|timed out",
        "{where} does not answer in time: check host and port, firewalls, and that it is a Postgres server",
    ),
    (
        "connection refused|no route to host|network is unreachable|no such file or directory",
        "nothing listens at {where}: check host and port, and that Postgres runs there",
    ),
)


def connection_error(error: Exception, url: URL, *, setting: str) -> StorageError:
    """Return the error for the user that says why `url` could not be connected to: `AwayError` where that may pass.

    Args:
        error: What psycopg2 or SQLAlchemy raised.
        url: The parsed URL.
        setting: Where the user gave the URL.
    """
    text = redact(one_line(error))
    meaning = next((said for pattern, said in _MEANINGS if re.search(pattern, text, re.IGNORECASE)), None)
    said = (meaning or "cannot connect: {text}").format(
        where=f"{url.host or 'the local socket'}:{url.port or 5432}",
        host=url.host,
        user=url.username,
        database=url.database,
        text=text,
    )
    kind = AwayError if may_pass(text) and not _UNKNOWN.search(text) else StorageError
    return kind(f"{setting} {redact(url.render_as_string())}: {said}")


OPENING = 10.0  # seconds that a command waits at its start: whoever mistyped an address is told soon

# A peer that vanished is noticed after about 35 s (libpq parameters; times in seconds, tcp_user_timeout in ms).
# The server's half is set on the roles (see storage.database.roles): PgBouncer would refuse `options=` in the URL.
_CLIENT_SETTINGS = {
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 20,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 35_000,
}


def client_settings(url: sqlalchemy.URL, *, application_name: str) -> dict[str, Any]:
    """Return the libpq parameters for a URL; what the URL itself sets is left to it."""
    settings = {**_CLIENT_SETTINGS, "application_name": application_name}
    return {name: value for name, value in settings.items() if name not in url.query}


def make_engine(
    url: str, *, application_name: str, pool_size: int = 2, max_overflow: int = 3, pre_ping: bool = True
) -> sqlalchemy.Engine:
    """Return an engine whose connections are tested before use and notice a dead peer.

    Safe behind PgBouncer in transaction mode: it keeps no state in the session.

    Args:
        url: A Postgres URL in any of its spellings.
        application_name: What `pg_stat_activity` shows for the connections; Postgres cuts it at 63 bytes.
        pool_size: Connections kept open.
        max_overflow: Connections opened above that when all are in use.
        pre_ping: Whether a connection is tested before use; whoever repeats what fails can do without.

    Raises:
        StorageError: The URL is not one of Postgres.
    """
    import sqlalchemy as sa

    parsed = sa.make_url(normalise(url))
    return sa.create_engine(
        parsed,
        pool_size=pool_size,
        max_overflow=max_overflow,
        pool_pre_ping=pre_ping,
        connect_args=client_settings(parsed, application_name=application_name),
    )


@contextmanager
def each_committed(engine: sqlalchemy.Engine) -> Iterator[sqlalchemy.Connection]:
    """Yield a connection on which each statement is a transaction of its own: one round trip, no BEGIN, no COMMIT.

    SQLAlchemy's isolation level AUTOCOMMIT does the same, but sends a SET each time that the connection goes back to
    its pool.
    """
    with engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        driver.autocommit = True
        try:
            yield connection
        finally:
            if not driver.closed:
                driver.autocommit = False


def connect(url: str, *, application_name: str, setting: str = "--storage-url") -> Connection:
    """Return one plain psycopg2 connection.

    Raises:
        StorageError: Why it could not be made, in one line.
    """
    import psycopg2
    from sqlalchemy.engine import make_url

    parsed = make_url(normalise(url, setting=setting))
    dsn = parsed.set(drivername="postgresql").render_as_string(hide_password=False)
    try:
        connection: Connection = psycopg2.connect(dsn, **client_settings(parsed, application_name=application_name))
    except psycopg2.Error as error:
        raise connection_error(error, parsed, setting=setting) from None
    return connection


@contextmanager
def open_cursor(
    url: str, *, application_name: str, setting: str = "--storage-url", autocommit: bool = False
) -> Iterator[Any]:
    """Yield a cursor on a connection of its own, in a transaction that is committed at the end.

    Args:
        url: of the database.
        application_name: what `pg_stat_activity` shows for the connection.
        setting: where the user gave the URL.
        autocommit: whether each statement is a transaction of its own instead.

    Raises:
        StorageError: the connection cannot be made.
    """
    with closing(connect(url, application_name=application_name, setting=setting)) as connection:
        connection.autocommit = autocommit
        with nullcontext() if autocommit else connection, connection.cursor() as cursor:
            yield cursor


@contextmanager
def statement_errors(url: str, setting: str) -> Iterator[None]:
    """Turn errors of psycopg2 into errors of one line without a password.

    Raises:
        AwayError: the database went away.
        StorageError: it rejects a statement.
    """
    import psycopg2

    try:
        yield
    except psycopg2.Error as error:
        is_away = error.pgcode is None or error.pgcode.startswith(("08", "57P"))
        text = without_secret(one_line(error), url)
        raise (AwayError if is_away else StorageError)(f"{setting} {redact(url)}: {text}") from None


def answers(url: str, question: str = "SELECT true") -> bool:
    """Whether the database lets this user in and the answer to `question` is true."""
    import psycopg2

    with suppress(StorageError, psycopg2.Error), open_cursor(url, application_name="hpsearch-health") as cursor:
        cursor.execute(question)
        return bool(cursor.fetchone() == (True,))
    return False


def check_database(url: str, *, patience: float | None = None) -> None:
    """Check that studies can be kept at `url`, without changing anything there.

    Args:
        url: of the database.
        patience: seconds in which one that is away, or cuts connections, may come back; `OPENING` by default.

    Raises:
        AwayError: it does not answer, or cuts connections.
        StorageError: The server cannot be reached, refuses the user, is no Postgres or a read-only one, or the tables
            are missing, of another version of Optuna, or may not be written.
    """
    from hpsearch.storage.database.retry import retrying

    patience = OPENING if patience is None else patience
    retrying(patience, also=AwayError)(_check_once, url)


def _check_once(url: str) -> None:
    head = f"--storage-url {redact(url)}"
    with statement_errors(url, "--storage-url"), open_cursor(url, application_name="hpsearch-check") as cursor:
        cursor.execute("SELECT current_user, pg_is_in_recovery(), current_schema()")
        user, read_only, schema = cursor.fetchone()
        if read_only:
            raise StorageError(f"{head}: this Postgres is a read-only replica: give the primary's URL")
        if schema is None:
            raise StorageError(
                f"{head}: user {user!r} lacks rights on the schema: GRANT USAGE ON SCHEMA public TO {user}"
            )
        cursor.execute(IS_RESTORED_BY_HALF)
        if cursor.fetchone() == (True,):
            raise StorageError(f"{head}: a restore into it was cut off: run the same 'hpsearch restore' again")
        _check_tables(cursor, user, head)
        for owner, found, needed in schema_revisions(cursor):
            if found != needed:
                raise StorageError(
                    f"{head}: the tables are of another version of {owner} (schema {found}, this one needs {needed}): "
                    "run hpsearch migrate as the owner of the database"
                )


def table_rights(cursor: Any) -> list[tuple[str, bool, list[str]]]:
    """Return for each table that a worker uses its name, whether it is missing, and the rights that this user lacks."""
    cursor.execute(
        """
        SELECT name, to_regclass(quote_ident(name)) IS NULL,
               CASE WHEN to_regclass(quote_ident(name)) IS NULL THEN ARRAY[]::text[] ELSE
               ARRAY(SELECT right_ FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS right_
                     WHERE NOT has_table_privilege(to_regclass(quote_ident(name)), right_)) END
        FROM unnest(%s) AS name
        """,
        ([*OPTUNA_TABLES, *OUR_TABLES],),
    )
    return [tuple(row) for row in cursor.fetchall()]


def schema_revisions(cursor: Any) -> list[tuple[str, str | None, str]]:
    """Return whose tables they are, the revision that they have, and the one that this release needs."""
    return [
        ("Optuna", read_revision(cursor, ALEMBIC_TABLE), OPTUNA_REVISION),
        ("hpsearch", read_revision(cursor, VERSION_TABLE), REVISION),
    ]


def read_revision(cursor: Any, table: str) -> str | None:
    """Return the revision of the schema that a version table of Alembic holds; None without table or revision."""
    if not has_table(cursor, table):
        return None
    cursor.execute(f"SELECT version_num FROM {table}")  # noqa: S608 a name of ours
    return next((str(revision) for (revision,) in cursor), None)


def has_table(cursor: Any, table: str) -> bool:
    """Whether a table of this name is visible to the user."""
    cursor.execute("SELECT to_regclass(%s) IS NOT NULL", (table,))
    return bool(cursor.fetchone()[0])


def _check_tables(cursor: Any, user: str, head: str) -> None:
    rows = table_rights(cursor)
    if all(is_missing for _, is_missing, _ in rows):
        raise StorageError(f"{head}: there are no tables yet: run hpsearch migrate as the owner of the database")
    if missing := ", ".join(name for name, is_missing, _ in rows if is_missing):
        raise StorageError(f"{head}: tables are missing ({missing}): run hpsearch migrate as the owner")
    if lacking := ", ".join(sorted({right for *_, rights in rows for right in rights})):
        tables = [name for name, _, rights in rows if rights]
        raise StorageError(
            f"{head}: user {user!r} lacks {lacking} on {', '.join(tables[:3])}"
            f"{' and more' if len(tables) > 3 else ''}: GRANT {lacking} ON ALL TABLES IN SCHEMA public TO {user}"
        )
