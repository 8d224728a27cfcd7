"""Opening Optuna's study storage on Postgres, with the tables made beforehand by ``hpsearch migrate``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from storage.connect import client_settings
from storage.urls import normalise

if TYPE_CHECKING:
    import sqlalchemy as sa
    from optuna.storages import BaseStorage


def open_storage(url: str, *, application_name: str, pool_size: int = 2) -> BaseStorage:
    """Return Optuna's cached storage on `url`: finished trials are read once per process.

    Call :func:`storage.connect.check_database` first: it says in one line what is wrong with a database.
    """
    import sqlalchemy as sa
    from optuna.storages import RDBStorage, get_storage

    parsed = sa.make_url(normalise(url))
    engine_options = {
        "pool_pre_ping": True,
        "pool_size": pool_size,
        "connect_args": client_settings(parsed, application_name=application_name),
    }
    return get_storage(RDBStorage(normalise(url), engine_kwargs=engine_options, skip_table_creation=True))


def engine_of(storage: BaseStorage) -> sa.Engine:
    """Return the engine under a storage of :func:`open_storage`, for queries of our own."""
    backend: Any = getattr(storage, "_backend", storage)
    engine: sa.Engine = backend.engine
    return engine
