"""Retries of database statements after dropped connections, restarts and deadlocks.

Repeated statements must be idempotent, because a reply may be lost after the commit: see
`hpsearch.storage.study_storage.lost_replies`.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa
import tenacity
from sqlalchemy.exc import DBAPIError

from hpsearch.storage.errors import format_error

RETRY_SECONDS = 300.0

_FIRST_WAIT, _LONGEST_WAIT = 0.1, 5.0  # seconds between two attempts

# SQLSTATE: connection exceptions, serialization failure, deadlock, shutdown, crash and start of the server,
# too many connections, idle transaction timeout.
_TRANSIENT = re.compile(r"08...|40001|40P01|57P0[123]|53300|25P03")

# Errors of new connections have no code. A retry does not help after errors with these texts.
_PERMANENT = re.compile(
    "authentication failed|no password supplied|no such user|does not exist|no such database|no pg_hba.conf entry"
    "|permission denied|not permitted to log in|certificate|invalid (connection option|port|dsn)|does not support SSL",
    re.IGNORECASE,
)

log = logging.getLogger(__name__)


def is_database_error(error: BaseException) -> bool:
    """Return whether the database, or its driver, raised this error."""
    import psycopg2
    from optuna.exceptions import StorageInternalError

    return isinstance(error, DBAPIError | psycopg2.Error | StorageInternalError)


def is_transient(error: BaseException) -> bool:
    """Return whether a retry of the statement that raised this error may succeed."""
    if not isinstance(error, DBAPIError):
        return False
    code = getattr(error.orig, "pgcode", None)
    if code is not None:
        return error.connection_invalidated or bool(_TRANSIENT.fullmatch(code))
    if error.connection_invalidated:
        return True
    kinds = sa.exc.OperationalError | sa.exc.InterfaceError
    return isinstance(error, kinds) and is_transient_connection_error(str(error.orig))


def is_cancelled(error: BaseException) -> bool:
    """Return whether a timeout of the server's settings, or an administrator, cancelled the statement."""
    return getattr(getattr(error, "orig", error), "pgcode", None) in {"57014", "55P03"}


def is_transient_connection_error(text: str) -> bool:
    """Return whether a retry may succeed after a connection error with this text of libpq."""
    return not _PERMANENT.search(text)


_limit_seconds = math.inf  # of `limit_retries`


@contextmanager
def limit_retries(seconds: float) -> Iterator[None]:
    """Retry each statement of this process for at most this time in the block, because a user waits for its end."""
    global _limit_seconds  # noqa: PLW0603 the limit is one of the process
    before, _limit_seconds = _limit_seconds, seconds
    try:
        yield
    finally:
        _limit_seconds = before


def retrying(retry_seconds: float = RETRY_SECONDS, *, also: type[Exception] | None = None) -> tenacity.Retrying:
    """Return a tenacity controller that retries after transient errors.

    The waits grow and are random, so that the workers of a fleet do not reconnect at the same time. The first wait and
    the end of the outage are logged. An error that is not transient is raised immediately. After `retry_seconds`, the
    last transient error is raised.
    Use the controller as ``retrying()(function)`` or ``for attempt in retrying(): with attempt: ...``.

    Args:
        retry_seconds: longest time to retry.
        also: type of errors that are transient too.
    """
    retry_seconds = min(retry_seconds, _limit_seconds)

    def should_retry(state: tenacity.RetryCallState) -> bool:
        error = None if state.outcome is None else state.outcome.exception()
        if error is None and state.attempt_number > 1 and retry_seconds > 0:
            log.warning("database available again after %.1f s", state.seconds_since_start)
        return error is not None and (is_transient(error) or (also is not None and isinstance(error, also)))

    def log_first_wait(state: tenacity.RetryCallState) -> None:
        if state.attempt_number == 1 and retry_seconds > 0:
            log.warning("database unavailable, retrying for up to %.0f s: %s", retry_seconds, _format_outcome(state))

    return tenacity.Retrying(
        retry=should_retry,
        # At least two attempts: if a process was frozen in its first attempt, the time may be over when it resumes.
        stop=tenacity.stop_all(tenacity.stop_after_delay(retry_seconds), tenacity.stop_after_attempt(2)),
        wait=tenacity.wait_random_exponential(multiplier=_FIRST_WAIT, max=_LONGEST_WAIT),
        before_sleep=log_first_wait,
        reraise=True,
    )


def _format_outcome(state: tenacity.RetryCallState) -> str:
    return format_error(None if state.outcome is None else state.outcome.exception())
