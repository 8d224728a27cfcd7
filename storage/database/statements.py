"""How statements reach the database: one round trip each, repeated while the database is away."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from hpsearch.storage.database.connect import each_committed
from hpsearch.storage.database.retry import PATIENCE, is_transient, retrying

T = TypeVar("T")

Rows = Sequence[Any]  # of SQLAlchemy


@lru_cache(maxsize=256)
def text(statement: str) -> sa.TextClause:
    """Return the statement, compiled once."""
    return sa.text(statement)


class Database:
    """Runs statements on an engine, for at most `patience` seconds each."""

    def __init__(self, engine: sa.Engine, patience: float = PATIENCE) -> None:
        self.engine = engine
        self.patience = patience

    def rows(self, statement: str | sa.TextClause, parameters: Mapping[str, Any]) -> Rows:
        """Run one statement, which must be safe to repeat, and return its rows."""
        return self.repeat(lambda _: self.run(statement, parameters))

    def rows_once(self, statement: str, parameters: Mapping[str, Any]) -> tuple[Rows, bool]:
        """Run one statement; return its rows, and whether it was sent before and the reply may have been lost."""
        return self.repeat(lambda repeated: (self.run(statement, parameters), repeated))

    def connected(self, call: Callable[[sa.Connection], T]) -> T:
        """Run `call(connection)`, each of whose statements is committed by itself and safe to repeat."""

        def run(_: bool) -> T:
            with each_committed(self.engine) as connection:
                return call(connection)

        return self.repeat(run)

    def transaction(self, call: Callable[[sa.Connection, bool], T]) -> T:
        """Run `call(connection, repeated)` in a transaction and commit it."""

        def run(repeated: bool) -> T:
            with self.engine.begin() as connection:
                return call(connection, repeated)

        return self.repeat(run)

    def repeat(self, call: Callable[[bool], T]) -> T:
        """Run `call(repeated)` until it does not fail for a passing reason."""
        try:
            return call(False)
        except DBAPIError as error:
            if not is_transient(error):
                raise
            failed: DBAPIError | None = error

        def again() -> T:
            nonlocal failed
            if failed is not None:  # counts as the first try, so that the waiting begins before the second
                error, failed = failed, None
                raise error
            return call(True)

        return retrying(self.patience)(again)

    def run(self, statement: str | sa.TextClause, parameters: Mapping[str, Any]) -> Rows:
        """Run one statement once and return its rows."""
        with each_committed(self.engine) as connection:
            prepared = text(statement) if isinstance(statement, str) else statement
            return connection.execute(prepared, parameters).all()
