"""The tables of MLflow in its own database."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hpsearch.storage.database.connect import make_engine
from hpsearch.storage.database.schema import ALEMBIC_TABLE
from hpsearch.storage.errors import StorageError, format_error

if TYPE_CHECKING:
    import sqlalchemy


def list_mlflow_tables() -> set[str]:
    """Return the names of the tables of the installed MLflow."""
    import mlflow.store.model_registry.dbmodels.models
    import mlflow.store.tracking.dbmodels.models
    import mlflow.store.workspace.dbmodels.models  # noqa: F401 each of these modules registers its tables
    from mlflow.store.db.base_sql_model import Base

    return {*Base.metadata.tables, ALEMBIC_TABLE}


def create_mlflow_tables(url: str, revision: str) -> None:
    """Create MLflow's tables of a revision in a database without tables.

    Raises:
        StorageError: the database rejects a statement.
    """
    from mlflow.store.tracking.dbmodels.initial_models import Base

    with _open_mlflow_engine(url) as engine:
        Base.metadata.create_all(engine)
        _upgrade_mlflow(engine, revision)


def upgrade_mlflow(url: str) -> None:
    """Upgrade MLflow's tables in this process; ``mlflow db upgrade`` would show the password in its command line.

    Raises:
        StorageError: the database rejects a statement.
    """
    with _open_mlflow_engine(url) as engine:
        _upgrade_mlflow(engine, "heads")


@contextmanager
def _open_mlflow_engine(url: str) -> Iterator[sqlalchemy.Engine]:
    from sqlalchemy.exc import DBAPIError

    logging.getLogger("mlflow").setLevel(logging.ERROR)
    engine = make_engine(url, application_name="hpsearch-restore")
    try:
        yield engine
    except DBAPIError as error:
        raise StorageError(f"MLflow's tables cannot be created or upgraded ({format_error(error)})") from None
    finally:
        engine.dispose()


def _upgrade_mlflow(engine: sqlalchemy.Engine, revision: str) -> None:
    from alembic import command
    from mlflow.store.db.utils import _get_alembic_config

    config = _get_alembic_config(str(engine.url))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
