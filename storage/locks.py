"""Advisory locks: who runs which trial, told by Postgres itself.

A session-level lock lives as long as the connection that took it. When a worker dies, its connection goes and its
lock with it, so that no heartbeat has to expire before the trial can be taken over.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from storage.connect import make_engine

# The first of the two 32-bit keys of a lock says what is locked, the second which one.
_STUDY, _TRIAL, _NAME = 0x68700001, 0x68700002, 0x68700003


class AdvisoryLocks:
    """The locks of one worker, on one connection of its own.

    Not for use behind a pooler in transaction mode, which gives a session's locks to strangers.
    """

    def __init__(self, url: str, *, application_name: str) -> None:
        engine = make_engine(url, application_name=application_name, pool_size=1, max_overflow=0)
        self._engine = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._connection: sa.Connection | None = None

    def _scalar(self, statement: str, **parameters: object) -> object:
        if self._connection is None:
            self._connection = self._engine.connect()
        try:
            return self._connection.execute(sa.text(statement), parameters).scalar()
        except DBAPIError as error:
            if error.connection_invalidated:
                self._connection.close()
                self._connection = None
            raise

    @contextmanager
    def study(self, study_id: int) -> Iterator[None]:
        """Hold the study: at most one claim at a time is made in it."""
        with self._held(_STUDY, study_id):
            yield

    @contextmanager
    def name(self, name: str) -> Iterator[None]:
        """Hold a study's name while it is looked up and created."""
        key = self._scalar("SELECT hashtext(:name)", name=name)
        assert isinstance(key, int)
        with self._held(_NAME, key):
            yield

    @contextmanager
    def _held(self, kind: int, key: int) -> Iterator[None]:
        self._scalar("SELECT pg_advisory_lock(:kind, :key)", kind=kind, key=key)
        try:
            yield
        finally:
            # A connection that broke meanwhile took the lock with it.
            if self._connection is not None:
                self._scalar("SELECT pg_advisory_unlock(:kind, :key)", kind=kind, key=key)

    def try_trial(self, trial_id: int) -> bool:
        """Take the trial's lock if no living worker has it."""
        return bool(self._scalar("SELECT pg_try_advisory_lock(:kind, :key)", kind=_TRIAL, key=trial_id))

    def release_trial(self, trial_id: int) -> None:
        """Give the trial's lock back."""
        self._scalar("SELECT pg_advisory_unlock(:kind, :key)", kind=_TRIAL, key=trial_id)

    def session(self) -> int:
        """Return the server's process id of this connection (connecting anew if it broke): the locks' identity."""
        try:
            pid = self._scalar("SELECT pg_backend_pid()")
        except DBAPIError as error:
            if not error.connection_invalidated:
                raise
            pid = self._scalar("SELECT pg_backend_pid()")
        assert isinstance(pid, int)
        return pid

    def close(self) -> None:
        """Close the connection; every lock on it is released by the server."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._engine.dispose()
