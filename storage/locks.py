"""Advisory locks of Postgres, held by a transaction: they end with it, also behind a pooler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa

# The first of the two 32-bit keys of a lock says what is locked, the second which one.
_STUDY, _NAME = 0x68700001, 0x68700003

_LOCK = sa.text("SELECT pg_advisory_xact_lock(:kind, :key)")
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
