"""Schema creation and upgrade, as the owner of the database."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpsearch.redaction import redact
from hpsearch.storage.database.connect import find_encoding_fault, make_engine, open_cursor, read_revision
from hpsearch.storage.database.libpq import check_server_user, ignore_variables
from hpsearch.storage.database.roles import (
    OWNER,
    find_shared_grantees,
    grant_workers,
    protect_owner_tables,
    warn_if_public_can_connect,
)
from hpsearch.storage.database.schema import ALEMBIC_TABLE, OPTUNA_REVISION, REVISION, REVISION_TABLES, VERSION_TABLE
from hpsearch.storage.database.schema_privileges import (
    find_foreign_code,
    find_transactions_of_others,
    revoke_create_privileges,
)
from hpsearch.storage.errors import StorageError, format_error
from hpsearch.storage.urls import normalise_url

if TYPE_CHECKING:
    from alembic.config import Config

MIGRATIONS = Path(__file__).with_name("migrations")

# Two 32-bit keys, distinct from those of hpsearch.storage.database.locks.
_LOCK = (0x68700004, 0)
_TRANSACTION_SECONDS = 60.0  # in which transactions of other users must end
_POLL_SECONDS = 0.1


def migrate(url: str, *, setting: str = "HPSEARCH_OWNER_URL", worker_roles: Collection[str] = ()) -> list[str]:
    """Create or upgrade the tables at `url` and grant the privileges of the worker roles.

    Idempotent. Concurrent calls wait for the first one.

    Args:
        url: URL of the database for its owner.
        setting: name of the setting that contains `url`, for messages.
        worker_roles: further roles of workers than those of a database of `hpsearch_owner`.

    Returns:
        Warnings, with the remedy: roles that have lost access, and privileges and objects that other users should not
        have in the database.

    Raises:
        StorageError: the database cannot be reached, the user may not create tables, a role does not exist, the
            tables belong to a newer version of Optuna or hpsearch, or other users own functions in their schema.
    """
    url = normalise_url(url, setting=setting)
    warnings = protect_schema(url, setting)
    with _migration_transaction(url, setting) as cursor:
        grantees = find_shared_grantees(cursor)
        _migrate_optuna(url, setting, read_revision(cursor, ALEMBIC_TABLE))
        _migrate_hpsearch(url, setting, read_revision(cursor, VERSION_TABLE))
        grant_workers(cursor, worker_roles)
        lost = sorted(grantees - find_shared_grantees(cursor))
        return [*warnings, *map(_describe_lost_access, lost), *warn_if_public_can_connect(cursor)]


def check_foreign_code(url: str, setting: str) -> None:
    """Reject functions and operators of other users in the schema; change nothing.

    Call it before any statement of the owner that could use them.

    Raises:
        StorageError: the database cannot be reached, or other users own objects in the schema.
    """
    with _migration_transaction(url, setting) as cursor:
        errors = find_foreign_code(cursor)
    if errors:
        raise StorageError(f"{setting} {redact(url)}: {errors[0]}")


def protect_schema(url: str, setting: str) -> list[str]:
    """Withdraw the privilege to create in the schema from other users, and reject their objects that could run code.

    Returns:
        Warnings, with the remedy.

    Raises:
        StorageError: the database cannot be reached, or other users own objects in the schema.
    """
    with _migration_transaction(url, setting) as cursor:
        is_new = read_revision(cursor, VERSION_TABLE) is None
        if is_new and (fault := find_encoding_fault(cursor)):
            raise StorageError(f"{setting} {redact(url)}: {fault}")
        errors, warnings = revoke_create_privileges(cursor)
    if not errors:
        _wait_for_open_transactions(url, setting)
        with _migration_transaction(url, setting) as cursor:
            errors, _ = revoke_create_privileges(cursor)
    if errors:
        raise StorageError(f"{setting} {redact(url)}: {errors[0]}")
    return warnings


def _wait_for_open_transactions(url: str, setting: str) -> None:
    """Wait for the end of transactions of other users, which may have created objects that are not visible yet."""
    left, deadline = None, time.monotonic() + _TRANSACTION_SECONDS
    while True:
        with _migration_transaction(url, setting) as cursor:
            found = find_transactions_of_others(cursor)
        left = found if left is None else left & found
        if not left:
            return
        if time.monotonic() > deadline:
            raise StorageError(
                f"{setting} {redact(url)}: transactions of other users are open for more than "
                f"{_TRANSACTION_SECONDS:.0f} s ({', '.join(sorted(left))}), and could create functions that run as the "
                "owner; end them, as a superuser with pg_terminate_backend, or ROLLBACK PREPARED"
            )
        time.sleep(_POLL_SECONDS)


@contextmanager
def _migration_transaction(url: str, setting: str) -> Iterator[Any]:
    """Yield a cursor in a transaction that excludes other migrations."""
    with (
        _convert_errors(url, setting),
        open_cursor(url, application_name="hpsearch-migrate", setting=setting) as cursor,
    ):
        # With this isolation level, the transaction sees the commits of the previous holder of the lock.
        cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        for timeout in ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"):
            cursor.execute(f"SET LOCAL {timeout} = 0")
        # A transaction lock, unlike a session lock, also works through a pooler.
        cursor.execute("SELECT pg_advisory_xact_lock(%s, %s)", _LOCK)
        yield cursor


def _describe_lost_access(role: str) -> str:
    return (
        f"the role {role} no longer has access to this database, because {OWNER} does not own it; "
        f"if its workers use this role, run hpsearch migrate --worker-role {role}"
    )


def create_tables(url: str, revision: str, *, setting: str = "HPSEARCH_OWNER_URL") -> None:
    """Create the tables of an earlier revision of hpsearch in a database without tables, for `migrate` to upgrade.

    Raises:
        StorageError: the database cannot be reached, the user may not create tables, or another user has changed them.
    """
    url = normalise_url(url, setting=setting)
    with _convert_errors(url, setting):
        _migrate_optuna(url, setting, None)
        _migrate_hpsearch(url, setting, None, revision)
    with _migration_transaction(url, setting) as cursor:
        # Until now, the default privileges of worker roles held for the new tables.
        cursor.execute(f"LOCK TABLE {', '.join(REVISION_TABLES)} IN ACCESS EXCLUSIVE MODE")
        protect_owner_tables(cursor)
        if [read_revision(cursor, table) for table in REVISION_TABLES] != [OPTUNA_REVISION, revision]:
            raise StorageError(f"{setting} {redact(url)}: another user has changed the new tables; repeat the command")


@contextmanager
def _convert_errors(url: str, setting: str) -> Iterator[None]:
    import psycopg2
    from sqlalchemy.exc import DBAPIError

    try:
        yield
    except (psycopg2.OperationalError, psycopg2.errors.InsufficientPrivilege, DBAPIError) as error:
        raise StorageError(
            f"{setting} {redact(url)}: cannot create tables ({format_error(error)}); give the database owner's URL"
        ) from None


def _migrate_optuna(url: str, setting: str, found: str | None) -> None:
    if found == OPTUNA_REVISION:
        return
    from optuna.storages import RDBStorage
    from sqlalchemy.engine import make_url

    # Without a stored revision, the tables are created and stamped, also after an interrupted creation, because each
    # step is repeatable. Tables of an older version are upgraded below.
    check_server_user(make_url(url))
    with ignore_variables(make_url(url)):
        storage = RDBStorage(url, skip_compatibility_check=True, skip_table_creation=found is not None)
    try:
        found = storage.get_current_version()
        _check_known("Optuna", found, storage.get_all_versions(), url, setting)
        if found != storage.get_head_version():
            with _root_handler():
                storage.upgrade()
    finally:
        storage.engine.dispose()


def _migrate_hpsearch(url: str, setting: str, found: str | None, target: str = "head") -> None:
    from alembic import command

    if found == REVISION:
        return
    if found is not None:
        _check_known("hpsearch", found, list_revisions(MIGRATIONS), url, setting)
    config = _alembic_config(MIGRATIONS)
    engine = make_engine(url, application_name="hpsearch-migrate")
    try:
        with engine.connect() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, target)
    finally:
        engine.dispose()


def _check_known(name: str, found: str, known: Collection[str], url: str, setting: str) -> None:
    if found not in known:
        raise StorageError(f"{setting} {redact(url)}: the tables need a newer {name} (schema {found}); update {name}")


def list_revisions(scripts: Path) -> set[str]:
    """Return the revisions in a folder of Alembic migrations."""
    from alembic.script import ScriptDirectory

    return {script.revision for script in ScriptDirectory.from_config(_alembic_config(scripts)).walk_revisions()}


def _alembic_config(scripts: Path) -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(scripts).replace("%", "%%"))
    return config


@contextmanager
def _root_handler() -> Iterator[None]:
    """Add a handler to the root logger within the context.

    If the root logger has no handler, Optuna's migrations configure logging, which disables all existing loggers.
    """
    handler = logging.NullHandler()
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
