"""Opening the study storage on Postgres, with the tables made beforehand by ``hpsearch migrate``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpsearch.storage.database.connect import make_engine
from hpsearch.storage.database.retry import PATIENCE

if TYPE_CHECKING:
    from hpsearch.storage.study_storage import PostgresStorage


def open_storage(url: str, *, application_name: str, pool_size: int = 2, patience: float = PATIENCE) -> PostgresStorage:
    """Return the storage on `url`.

    Call :func:`storage.database.connect.check_database` first: it says in one line what is wrong with a database.

    Args:
        url: A Postgres URL in any of its spellings.
        application_name: What `pg_stat_activity` shows for the connections.
        pool_size: Connections kept open.
        patience: For how many seconds a call waits for a database that is away.
    """
    from hpsearch.storage.study_storage import PostgresStorage

    # Without pre-ping, which is a round trip more each time: a statement whose connection was dropped is repeated.
    engine = make_engine(url, application_name=application_name, pool_size=pool_size, pre_ping=False)
    return PostgresStorage(engine, patience=patience)
