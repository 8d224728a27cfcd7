"""Advisory locks of Postgres, held by a transaction: they end with it, also behind a pooler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

log = logging.getLogger(__name__)

# The first of the two 32-bit keys of a lock says what is locked, the second which one.
_STUDY, _TURN, _NAME, _REGISTRY = 0x68700001, 0x68700002, 0x68700003, 0x68700005

# Sent with the first statement of a transaction in which others wait for this process: the server ends it, and lets
# go of its locks, when the process freezes in it (stopped by a signal, a paused machine), and the process repeats it.
UNLESS_FROZEN = "SET LOCAL idle_in_transaction_session_timeout = '10s';"

_UNLESS_FROZEN_IN_A_REQUEST = "SET LOCAL idle_in_transaction_session_timeout = '60s';"  # to MLflow

_LOCK = sa.text(f"{_UNLESS_FROZEN_IN_A_REQUEST} SELECT pg_advisory_xact_lock(:kind, :key)")
_LOCK_NAME = sa.text("SELECT pg_advisory_xact_lock(:kind, hashtext(:name))")


@contextmanager
def study_lock(engine: sa.Engine, study_id: int) -> Iterator[None]:
    """Hold a study while its parent run is looked up and made."""
    with engine.begin() as connection:
        connection.execute(_LOCK, {"kind": _STUDY, "key": study_id})
        yield


@contextmanager
def name_lock(engine: sa.Engine, name: str) -> Iterator[None]:
    """Hold a study's name while it is looked up and created."""
    with engine.begin() as connection:
        connection.execute(_LOCK_NAME, {"kind": _NAME, "name": name})
        yield


@contextmanager
def registry_lock(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Hold what the database says of the model registry while the two are brought in line; yield the transaction."""
    with engine.begin() as connection:
        connection.execute(_LOCK, {"kind": _REGISTRY, "key": 0})
        yield connection


_TURN_WITHIN = sa.text(f"""
    {UNLESS_FROZEN} SELECT set_config('lock_timeout', :milliseconds, true);
    SELECT pg_advisory_xact_lock(:kind, :key)
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
                log.warning("no turn to write a suggestion: %s", " ".join(str(error.orig).split()))
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
