"""Execution of statements in one round trip each, with retries while the database is unavailable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from hpsearch.storage.database.connect import open_autocommit
from hpsearch.storage.database.retry import RETRY_SECONDS, is_transient, retrying

T = TypeVar("T")

Rows = Sequence[Any]  # rows of SQLAlchemy


@lru_cache(maxsize=256)
def to_sql(statement: str) -> sa.TextClause:
    """Return the statement as an SQLAlchemy clause; the parsed clause is cached."""
    return sa.text(statement)


class Database:
    """Database access through an engine; each call is retried for at most `retry_seconds`."""

    def __init__(self, engine: sa.Engine, retry_seconds: float = RETRY_SECONDS) -> None:
        self.engine = engine
        self.retry_seconds = retry_seconds

    def fetch_rows(self, statement: str | sa.TextClause, parameters: Mapping[str, Any]) -> Rows:
        """Run one idempotent statement and return its rows."""
        return self.retry(lambda _: self.run_once(statement, parameters))

    def fetch_with_retry_flag(self, statement: str, parameters: Mapping[str, Any]) -> tuple[Rows, bool]:
        """Run one statement; return its rows and whether it was retried, so that an earlier try may have committed."""
        return self.retry(lambda is_retry: (self.run_once(statement, parameters), is_retry))

    def run_autocommit(self, call: Callable[[sa.Connection], T]) -> T:
        """Run `call(connection)` and return its result. Each statement commits on its own; retries may repeat it."""

        def run_call(_: bool) -> T:
            with open_autocommit(self.engine) as connection:
                return call(connection)

        return self.retry(run_call)

    def run_transaction(self, call: Callable[[sa.Connection, bool], T]) -> T:
        """Run `call(connection, is_retry)` in a transaction, commit the transaction, and return the result."""

        def run_call(is_retry: bool) -> T:
            with self.engine.begin() as connection:
                return call(connection, is_retry)

        return self.retry(run_call)

    def retry(self, call: Callable[[bool], T]) -> T:
        """Run `call(is_retry)` until it raises no transient error, and return its result."""
        try:
            return call(False)
        except DBAPIError as error:
            if not is_transient(error):
                raise
            failed: DBAPIError | None = error

        def retry_call() -> T:
            nonlocal failed
            if failed is not None:  # the failed call is the first attempt, so that the wait precedes the second
                error, failed = failed, None
                raise error
            return call(True)

        return retrying(self.retry_seconds)(retry_call)

    def run_once(self, statement: str | sa.TextClause, parameters: Mapping[str, Any]) -> Rows:
        """Run one statement without retries and return its rows."""
        with open_autocommit(self.engine) as connection:
            prepared = to_sql(statement) if isinstance(statement, str) else statement
            return connection.execute(prepared, parameters).all()
