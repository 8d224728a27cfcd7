"""Advisory locks of Postgres, held by a transaction: they end with it, also behind a pooler.

A process may freeze in it (stopped by a signal, on a paused machine). The server then ends the transaction after a
while and lets go of its locks: what the process does when it wakes up must find that out (`still_held`), or fail.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from hpsearch.storage.database.retry import is_transient
from hpsearch.storage.errors import AwayError, one_line

log = logging.getLogger(__name__)

# The first of the two 32-bit keys of a lock says what is locked, the second which one.
_STUDY, _TURN, _NAME, _REGISTRY, _RUN = 0x68700001, 0x68700002, 0x68700003, 0x68700005, 0x68700006


def limits(*, idle: int | None = None, wait: int | None = None) -> str:
    """Return statements to send with a transaction's first.

    Args:
        idle: seconds in which its process does nothing after which the server ends it.
        wait: seconds to wait for a lock.
    """
    named = (("idle_in_transaction_session_timeout", idle), ("lock_timeout", wait))
    return " ".join(f"SET LOCAL {name} = '{seconds}s';" for name, seconds in named if seconds is not None)


UNLESS_FROZEN = limits(idle=10)  # where statement follows statement; who was cut off repeats all of it
_IN_REQUESTS = 60  # seconds: MLflow is asked within the transaction
_IN_UPLOADS = 120  # seconds: it is sent a model

_LOCK = "SELECT pg_advisory_xact_lock(:kind, :key)"
_LOCK_IN_REQUESTS = sa.text(f"{limits(idle=_IN_REQUESTS)} {_LOCK}")
_LOCK_RUN = sa.text(f"{limits(idle=_IN_UPLOADS, wait=1)} {_LOCK}")
_LOCK_NAME = sa.text(f"{limits(wait=600)} SELECT pg_advisory_xact_lock(:kind, hashtext(:name))")
_LOCK_NOT_AVAILABLE = "55P03"  # SQLSTATE


class LockHeldError(AwayError):
    """Another process has the lock for long: it is slow, or frozen."""


class LockLostError(AwayError):
    """The server took the lock from this process: it froze, or what it waited for took too long."""


def study_lock(engine: sa.Engine, study_id: int) -> AbstractContextManager[sa.Connection]:
    """Hold a study while its parent run is looked up and made; yield the transaction.

    Raises:
        LockLostError: see `still_held`.
    """
    return _held(engine, _LOCK_IN_REQUESTS, kind=_STUDY, key=study_id)


def registry_lock(engine: sa.Engine) -> AbstractContextManager[sa.Connection]:
    """Hold what the database says of the model registry while the two are brought in line; yield the transaction.

    Raises:
        LockLostError: see `still_held`.
    """
    return _held(engine, _LOCK_IN_REQUESTS, kind=_REGISTRY, key=0)


def run_lock(engine: sa.Engine, trial_id: int) -> AbstractContextManager[sa.Connection]:
    """Hold a trial's run while it is looked up and made, or its model sent; yield the transaction.

    Raises:
        LockHeldError: another process has held it for some seconds.
        LockLostError: see `still_held`.
    """
    return _held(engine, _LOCK_RUN, kind=_RUN, key=trial_id)


def name_lock(engine: sa.Engine, name: str) -> AbstractContextManager[sa.Connection]:
    """Hold a study's name while it is looked up and created, for as long as its objective's rehearsal takes; yield it.

    Raises:
        LockHeldError: another process has held it for ten minutes.
        LockLostError: see `still_held`.
    """
    return _held(engine, _LOCK_NAME, kind=_NAME, name=name)


def still_held(connection: sa.Connection) -> None:
    """Make sure, before what cannot be undone, that a lock is still held; its time begins anew.

    Raises:
        LockLostError: the server ended the transaction; nothing that was written in it is there.
    """
    try:
        connection.execute(sa.text("SELECT 1"))
    except DBAPIError as error:
        raise _lost(error) from None


@contextmanager
def _held(engine: sa.Engine, statement: sa.TextClause, **keys: int | str) -> Iterator[sa.Connection]:
    with ExitStack() as stack:
        try:
            connection = engine.connect()
            stack.callback(_close, connection)
            connection.execute(statement, keys)
            yield connection
            connection.commit()
        except DBAPIError as error:
            raise _lost(error) from None


def _lost(error: DBAPIError) -> Exception:
    if getattr(error.orig, "pgcode", None) == _LOCK_NOT_AVAILABLE:
        return LockHeldError(
            "another process has held what this one waits for in the database for long: it may be frozen; end it, or "
            "try again later"
        )
    if is_transient(error):
        return LockLostError("the database ended a transaction that took too long, or went away: try again")
    return error


_TURN_WITHIN = sa.text(f"""
    {UNLESS_FROZEN} SELECT set_config('lock_timeout', :milliseconds, true);
    {_LOCK}
""")


@contextmanager
def suggestion_turn(engine: sa.Engine, study_id: int, *, patience: float = 5.0) -> Iterator[Callable[[], bool]]:
    """Yield a function that takes the turn to write a trial's parameters, which is kept until the exit.

    It returns whether it got the turn. Waiting ends after `patience` seconds: a worker that is frozen while it has the
    turn must not hold up the others, and what they risk without it is to run one configuration twice.
    """
    with ExitStack() as stack:

        def take() -> bool:
            connection = engine.connect()
            stack.callback(_close, connection)  # which ends the transaction, and the turn
            try:
                milliseconds = str(int(patience * 1000))
                connection.execute(_TURN_WITHIN, {"milliseconds": milliseconds, "kind": _TURN, "key": study_id})
            except DBAPIError as error:
                log.warning("no turn to write a suggestion: %s", one_line(error))
                return False
            return True

        yield take


def _close(connection: sa.Connection) -> None:
    try:
        connection.rollback()
    except DBAPIError:  # the server was faster
        connection.invalidate()
    finally:
        connection.close()
