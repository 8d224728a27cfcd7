"""The schemas of the databases in a backup: which of them this installation knows, and MLflow's brought up to date."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from hpsearch.storage.backup.archive import Manifest
from hpsearch.storage.database import migrate
from hpsearch.storage.database.connect import make_engine
from hpsearch.storage.errors import StorageError


def check_known(manifest: Manifest) -> None:
    """Refuse a backup whose tables are of a newer version than is installed.

    Raises:
        StorageError: which version it is of.
    """
    import mlflow
    import optuna

    # What is installed has its migrations in these folders.
    places = (
        ("hpsearch", manifest.schema, Path(migrate.__file__).with_name("migrations")),
        ("Optuna", manifest.optuna_schema, Path(optuna.__file__).parent / "storages" / "_rdb" / "alembic"),
        ("MLflow", manifest.mlflow_schema, Path(mlflow.__file__).parent / "store" / "db_migrations"),
    )
    for name, found, scripts in places:
        if found is not None and found not in _revisions(scripts):
            raise StorageError(
                f"the backup is of a newer {name} (schema {found}; made by hpsearch {manifest.hpsearch}): "
                "install the versions that made it"
            )


def _revisions(scripts: Path) -> Iterable[str]:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(scripts).replace("%", "%%"))
    return {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}


def upgrade_mlflow(url: str) -> None:
    """Bring MLflow's tables to the installed version, as ``mlflow db upgrade`` does, which takes a password openly."""
    from mlflow.store.db.utils import _upgrade_db

    logging.getLogger("mlflow").setLevel(logging.ERROR)
    engine = make_engine(url, application_name="hpsearch-restore")
    try:
        _upgrade_db(engine)
    finally:
        engine.dispose()
