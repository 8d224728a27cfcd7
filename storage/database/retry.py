"""Waiting for a database that is away: dropped connections, restarts, deadlocks.

What is repeated must be safe to repeat: a reply may be lost after the server has done the work.
"""

from __future__ import annotations

import logging
import re

import sqlalchemy as sa
import tenacity
from sqlalchemy.exc import DBAPIError

from hpsearch.storage.errors import one_line

PATIENCE = 300.0  # seconds

_FIRST_WAIT, _LONGEST_WAIT = 0.1, 5.0  # seconds

# SQLSTATE: connection exceptions, serialization failure, deadlock, the server's shutdown, crash and start,
# too many connections, a transaction cut because it was idle.
_TRANSIENT = re.compile(r"08...|40001|40P01|57P0[123]|53300|25P03")

# A connection that cannot be made carries no code. These are the texts of what waiting does not mend.
_PERMANENT = re.compile(
    "authentication failed|no password supplied|no such user|does not exist|no such database|no pg_hba.conf entry"
    "|permission denied|not permitted to log in|certificate|invalid (connection option|port|dsn)|does not support SSL",
    re.IGNORECASE,
)

log = logging.getLogger(__name__)


def is_transient(error: BaseException) -> bool:
    """Whether the same statement may succeed when it is sent again."""
    if not isinstance(error, DBAPIError):
        return False
    code = getattr(error.orig, "pgcode", None)
    if code is not None:
        return error.connection_invalidated or bool(_TRANSIENT.fullmatch(code))
    if error.connection_invalidated:
        return True
    kinds = sa.exc.OperationalError | sa.exc.InterfaceError
    return isinstance(error, kinds) and may_pass(str(error.orig))


def may_pass(text: str) -> bool:
    """Whether what a connection failed of, in libpq's words, may be over the next time."""
    return not _PERMANENT.search(text)


def retrying(patience: float = PATIENCE, *, also: type[Exception] | None = None) -> tenacity.Retrying:
    """Return a tenacity controller that repeats what fails for a passing reason, for at most `patience` seconds.

    It waits longer each time, at random, so that a fleet does not come back all at once; it logs when the waiting
    starts and when it is over. Any other error is raised at once, and the last one when patience is at an end.
    Use it as ``retrying()(function)`` or ``for attempt in retrying(): with attempt: ...``.

    Args:
        patience: seconds.
        also: an error that passes too.
    """

    def again(state: tenacity.RetryCallState) -> bool:
        error = None if state.outcome is None else state.outcome.exception()
        return _is_to_be_repeated(state) or (also is not None and isinstance(error, also))

    def announce(state: tenacity.RetryCallState) -> None:
        if state.attempt_number == 1:
            log.warning("the database is away, trying again for up to %.0f s: %s", patience, _line(state))

    return tenacity.Retrying(
        retry=again,
        # Twice at least: a process that was frozen in its first try wakes up with its patience at an end.
        stop=tenacity.stop_all(tenacity.stop_after_delay(patience), tenacity.stop_after_attempt(2)),
        wait=tenacity.wait_random_exponential(multiplier=_FIRST_WAIT, max=_LONGEST_WAIT),
        before_sleep=announce,
        reraise=True,
    )


def _is_to_be_repeated(state: tenacity.RetryCallState) -> bool:
    error = None if state.outcome is None else state.outcome.exception()
    if error is None and state.attempt_number > 1:
        log.warning("the database is back after %.1f s", state.seconds_since_start)
    return error is not None and is_transient(error)


def _line(state: tenacity.RetryCallState) -> str:
    return one_line(None if state.outcome is None else state.outcome.exception())
