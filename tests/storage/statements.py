"""Record the statements that a storage sends to its database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa

from hpsearch.storage.study_storage.storage import PostgresStorage


@contextmanager
def statements(storage: PostgresStorage) -> Iterator[list[str]]:
    """Record the statements sent to the database; each element is a round trip."""
    sent: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        sent.append(statement)

    sa.event.listen(storage.engine, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        sa.event.remove(storage.engine, "before_cursor_execute", note)
