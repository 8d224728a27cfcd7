from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import optuna
import psycopg2
import pytest
import sqlalchemy as sa
from optuna.storages import RDBStorage
from optuna.storages._rdb import models

from hpsearch.storage.database.connect import check_database
from hpsearch.storage.database.migrate import migrate
from hpsearch.storage.database.roles import WORKER
from hpsearch.storage.database.schema import OPTUNA_REVISION, OPTUNA_TABLES, REVISION_TABLES
from hpsearch.storage.errors import StorageError
from tests.conftest import execute
from tests.faults.harness import Zygote

_MIGRATE = """
import sys, time
from pathlib import Path
from hpsearch.storage.database.migrate import migrate
print("ready", flush=True)
while not Path(sys.argv[2]).exists():
    time.sleep(0.001)
migrate(sys.argv[1])
"""


def _worker_url(url: str) -> str:
    return sa.make_url(url).set(username=WORKER, password=WORKER).render_as_string(hide_password=False)


def _use(url: str) -> None:
    study = optuna.create_study(study_name="s", storage=url)
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=3)
    assert len(optuna.load_study(study_name="s", storage=url).trials) == 3


def test_the_recorded_schema_of_optuna_is_correct(owner_url: str) -> None:
    assert RDBStorage(owner_url).get_head_version() == OPTUNA_REVISION
    assert set(OPTUNA_TABLES) == set(models.BaseModel.metadata.tables)


def test_an_empty_database_is_ready_for_workers(empty_database_url: str) -> None:
    migrate(empty_database_url)
    migrate(empty_database_url)
    worker = _worker_url(empty_database_url)
    check_database(worker)
    _use(worker)


def test_four_concurrent_migrations(zygote: Zygote, empty_database_url: str, tmp_path: Path) -> None:
    starters = [zygote.python(_MIGRATE, empty_database_url, tmp_path / "go") for _ in range(4)]
    for starter in starters:
        starter.lines(1)
    (tmp_path / "go").touch()
    said = [starter.communicate()[0] for starter in starters]
    assert [starter.returncode for starter in starters] == [0] * 4, said
    check_database(_worker_url(empty_database_url))
    engine = sa.create_engine(empty_database_url)
    with engine.connect() as connection:
        for table in ("version_info", "alembic_version"):
            assert connection.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar() == 1
    engine.dispose()


def test_a_killed_migration_is_completed_by_the_next(empty_database_url: str) -> None:
    # A kill between Optuna's transactions leaves tables without a revision.
    engine = sa.create_engine(empty_database_url)
    models.BaseModel.metadata.create_all(engine)
    engine.dispose()
    migrate(empty_database_url)
    check_database(_worker_url(empty_database_url))


def test_tables_of_an_older_optuna_are_upgraded(owner_url: str) -> None:
    study = optuna.create_study(study_name="kept", storage=owner_url)
    study.add_trial(optuna.trial.create_trial(value=1.5))
    engine = sa.create_engine(owner_url)
    with engine.begin() as connection:  # as Optuna 3.1 left it
        connection.exec_driver_sql("DROP INDEX ix_trials_study_id")
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = 'v3.0.0.d'")
    with pytest.raises(StorageError, match=r"schema v3\.0\.0\.d, required v3\.2\.0\.a"):
        check_database(owner_url)

    logger = logging.getLogger("somebody.else")
    migrate(owner_url)

    assert not logger.disabled  # Optuna's migrations disable all loggers if the root logger has no handler
    check_database(_worker_url(owner_url))
    indexes = sa.inspect(engine).get_indexes("trials")
    assert "trials_study_id_key" in [index["name"] for index in indexes]
    engine.dispose()
    assert optuna.load_study(study_name="kept", storage=owner_url).best_value == 1.5


def test_tables_of_a_newer_optuna_are_not_changed(owner_url: str) -> None:
    engine = sa.create_engine(owner_url)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = 'v9.0.0.a'")
    with pytest.raises(StorageError, match=r"newer Optuna \(schema v9\.0\.0\.a\)"):
        migrate(owner_url)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar() == "v9.0.0.a"
    engine.dispose()


def test_a_worker_role_cannot_change_the_revisions(owner_url: str, database_url: str) -> None:
    for table in REVISION_TABLES:
        with pytest.raises(psycopg2.errors.InsufficientPrivilege):
            execute(database_url, f"UPDATE {table} SET version_num = '0009'")
    migrate(owner_url)
    check_database(database_url)


def test_a_worker_role_cannot_migrate(empty_database_url: str) -> None:
    with pytest.raises(StorageError, match=r"HPSEARCH_OWNER_URL .* give the database owner's URL") as raised:
        migrate(_worker_url(empty_database_url))
    assert "\n" not in str(raised.value)
    assert f":{WORKER}@" not in str(raised.value)


def test_a_database_with_one_user_for_everything(postgres_server: Any) -> None:
    """As on a user's server, where the worker role does not exist or is not used."""
    postgres_server.execute("CREATE ROLE single LOGIN PASSWORD 'single'")
    postgres_server.execute("CREATE DATABASE single OWNER single")
    try:
        url = postgres_server.url("single", user="single")
        migrate(url)
        check_database(url)
        _use(url)
    finally:
        postgres_server.execute("DROP DATABASE single WITH (FORCE)")
        postgres_server.execute("DROP ROLE single")
