"""Advisory locks of Postgres that belong to a transaction, so that they also work through a pooler.

If the process freezes (stopped by a signal, or on a paused machine), the server ends the transaction after an idle
timeout and releases the locks. When the process resumes, it must detect the loss with `check_lock_held`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from hpsearch.storage.database.retry import is_transient
from hpsearch.storage.errors import ServiceUnavailableError, format_error

log = logging.getLogger(__name__)

# First of the two 32-bit keys of a lock: the kind of object; the second key is its id.
_STUDY, _SUGGESTION, _NAME, _REGISTRY, _RUN = 0x68700001, 0x68700002, 0x68700003, 0x68700005, 0x68700006


def format_timeouts(*, idle: int | None = None, wait: int | None = None) -> str:
    """Return the SET LOCAL statements that set timeouts at the start of a transaction.

    Args:
        idle: idle time in seconds after which the server ends the transaction; None for the server's setting.
        wait: longest time in seconds to wait for a lock; None for the server's setting.
    """
    named = (("idle_in_transaction_session_timeout", idle), ("lock_timeout", wait))
    return " ".join(f"SET LOCAL {name} = '{seconds}s';" for name, seconds in named if seconds is not None)


IDLE_TIMEOUT = format_timeouts(idle=10)  # for transactions without pauses; callers repeat a transaction that timed out
_REQUEST_SECONDS = 60  # for transactions with requests to MLflow
_UPLOAD_SECONDS = 120  # for transactions that upload a model

_LOCK = "SELECT pg_advisory_xact_lock(:kind, :key)"
_LOCK_IN_REQUESTS = sa.text(f"{format_timeouts(idle=_REQUEST_SECONDS)} {_LOCK}")
_LOCK_RUN = sa.text(f"{format_timeouts(idle=_UPLOAD_SECONDS, wait=1)} {_LOCK}")
_LOCK_NAME = sa.text(f"{format_timeouts(wait=600)} SELECT pg_advisory_xact_lock(:kind, hashtext(:name))")
_LOCK_NOT_AVAILABLE = "55P03"  # SQLSTATE


class LockHeldError(ServiceUnavailableError):
    """Lock that another process, which is slow or frozen, has held for too long."""


class LockLostError(ServiceUnavailableError):
    """Lock that the server released because this process froze, or was idle in the transaction for too long."""


def study_lock(engine: sa.Engine, study_id: int) -> AbstractContextManager[sa.Connection]:
    """Lock a study while its parent run is looked up or created; yield the connection with the transaction.

    Raises:
        LockLostError: see `check_lock_held`.
    """
    return _hold_lock(engine, _LOCK_IN_REQUESTS, kind=_STUDY, key=study_id)


def registry_lock(engine: sa.Engine) -> AbstractContextManager[sa.Connection]:
    """Lock the records of promotions during an update from the model registry; yield the connection.

    Raises:
        LockLostError: see `check_lock_held`.
    """
    return _hold_lock(engine, _LOCK_IN_REQUESTS, kind=_REGISTRY, key=0)


def run_lock(engine: sa.Engine, trial_id: int) -> AbstractContextManager[sa.Connection]:
    """Lock a trial's run while the run is looked up or created, or its model is uploaded; yield the connection.

    Raises:
        LockHeldError: another process has held the lock for some seconds.
        LockLostError: see `check_lock_held`.
    """
    return _hold_lock(engine, _LOCK_RUN, kind=_RUN, key=trial_id)


def name_lock(engine: sa.Engine, name: str) -> AbstractContextManager[sa.Connection]:
    """Lock a study's name while the study is looked up or created; yield the connection with the transaction.

    Raises:
        LockHeldError: another process has held the lock for ten minutes.
        LockLostError: see `check_lock_held`.
    """
    return _hold_lock(engine, _LOCK_NAME, kind=_NAME, name=name)


def check_lock_held(connection: sa.Connection) -> None:
    """Check, before an irreversible action, that this process still holds the lock, and restart the idle timeout.

    Raises:
        LockLostError: the server ended the transaction, rolled back its writes and released the lock.
    """
    try:
        connection.execute(sa.text("SELECT 1"))
    except DBAPIError as error:
        raise _convert_error(error) from None


@contextmanager
def _hold_lock(engine: sa.Engine, statement: sa.TextClause, **keys: int | str) -> Iterator[sa.Connection]:
    with ExitStack() as stack:
        try:
            connection = engine.connect()
            stack.callback(_close, connection)
            connection.execute(statement, keys)
            yield connection
            connection.commit()
        except DBAPIError as error:
            raise _convert_error(error) from None


def _convert_error(error: DBAPIError) -> Exception:
    if getattr(error.orig, "pgcode", None) == _LOCK_NOT_AVAILABLE:
        return LockHeldError("another hpsearch process holds a database lock and may be frozen; end it, or try again")
    if is_transient(error):
        return LockLostError("the database ended a transaction that took too long, or is unavailable; try again")
    return error


_LOCK_SUGGESTION = sa.text(f"""
    {IDLE_TIMEOUT} SELECT set_config('lock_timeout', :milliseconds, true);
    {_LOCK}
""")


@contextmanager
def suggestion_lock(engine: sa.Engine, study_id: int, *, wait_seconds: float = 5.0) -> Iterator[Callable[[], bool]]:
    """Yield a function that acquires the study's lock for suggestions, which is held until the context exits.

    A worker holds this lock while it checks its suggestion for duplicates and stores the parameters. Without the lock,
    two workers may run the same configuration. The function returns whether it acquired the lock: it stops waiting
    after `wait_seconds`, because a frozen worker must not block the other workers.
    """
    with ExitStack() as stack:

        def acquire_lock() -> bool:
            connection = engine.connect()
            stack.callback(_close, connection)  # ends the transaction and releases the lock
            try:
                parameters = {"milliseconds": str(int(wait_seconds * 1000)), "kind": _SUGGESTION, "key": study_id}
                connection.execute(_LOCK_SUGGESTION, parameters)
            except DBAPIError as error:
                log.warning("could not acquire the lock that prevents duplicate suggestions: %s", format_error(error))
                return False
            return True

        yield acquire_lock


def _close(connection: sa.Connection) -> None:
    try:
        connection.rollback()
    except DBAPIError:  # the server has already ended the transaction
        connection.invalidate()
    finally:
        connection.close()
