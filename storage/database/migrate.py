"""Schema creation and upgrade: one step, as the owner of the database."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa

from hpsearch.storage.database.connect import connect, make_engine
from hpsearch.storage.database.roles import grant_worker
from hpsearch.storage.database.schema import OPTUNA_REVISION, REVISION, VERSION_TABLE
from hpsearch.storage.errors import StorageError, one_line
from hpsearch.storage.urls import normalise, redact

# Two keys of 32 bits, beside those of hpsearch.storage.database.locks.
_LOCK = (0x68700004, 0)


def migrate(url: str, *, setting: str = "HPSEARCH_OWNER_URL") -> None:
    """Create or upgrade the tables at `url` and give the worker role its rights.

    Idempotent. Any number of processes may call it at once: one does the work, the others wait for it.

    Raises:
        StorageError: The database cannot be reached, the user may not create tables, or the tables are newer than
            this installation of Optuna knows.
    """
    import psycopg2
    from sqlalchemy.exc import DBAPIError

    url = normalise(url, setting=setting)
    try:
        with _locked(url, setting) as cursor:
            _migrate_optuna(url, setting)
            _migrate_ours(url, setting)
            grant_worker(cursor)
    except (psycopg2.errors.InsufficientPrivilege, DBAPIError) as error:
        raise StorageError(
            f"{setting} {redact(url)}: cannot create the tables ({one_line(error)}): "
            "give the URL of the database's owner"
        ) from None


@contextmanager
def _locked(url: str, setting: str) -> Iterator[object]:
    """Yield a cursor whose transaction holds the lock: unlike a session's, it holds through a pooler too."""
    connection = connect(url, application_name="hpsearch-migrate", setting=setting)
    try:
        with connection, connection.cursor() as cursor:
            for timeout in ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"):
                cursor.execute(f"SET LOCAL {timeout} = 0")
            cursor.execute("SELECT pg_advisory_xact_lock(%s, %s)", _LOCK)
            yield cursor
    finally:
        connection.close()


def _migrate_optuna(url: str, setting: str) -> None:
    engine = make_engine(url, application_name="hpsearch-migrate")
    try:
        found = _revision(engine, "alembic_version")
    finally:
        engine.dispose()
    if found == OPTUNA_REVISION:
        return
    from optuna.storages import RDBStorage

    # With no revision written yet the tables are created (again, where a creation was cut off: each step can be
    # repeated) and stamped; tables of an older release are left for the upgrade to change.
    storage = RDBStorage(url, skip_compatibility_check=True, skip_table_creation=found is not None)
    try:
        found = storage.get_current_version()
        if found not in storage.get_all_versions():
            raise StorageError(
                f"{setting} {redact(url)}: the tables are of a newer Optuna (schema {found}): install that version here"
            )
        if found != storage.get_head_version():
            with _root_handler():
                storage.upgrade()
    finally:
        storage.engine.dispose()


def _migrate_ours(url: str, setting: str) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")).replace("%", "%%"))
    engine = make_engine(url, application_name="hpsearch-migrate")
    try:
        found = _revision(engine, VERSION_TABLE)
        if found == REVISION:
            return
        known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
        if found is not None and found not in known:
            raise StorageError(
                f"{setting} {redact(url)}: the tables are of a newer hpsearch (schema {found}): "
                "install that version here"
            )
        with engine.connect() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    finally:
        engine.dispose()


def _revision(engine: sa.Engine, table: str) -> str | None:
    with engine.connect() as connection:
        if not connection.dialect.has_table(connection, table):
            return None
        revision = connection.execute(sa.select(sa.column("version_num")).select_from(sa.table(table))).scalar()
        return None if revision is None else str(revision)


@contextmanager
def _root_handler() -> Iterator[None]:
    """Give the root logger a handler: without one, Optuna's migrations set up logging and silence every logger."""
    handler = logging.NullHandler()
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
