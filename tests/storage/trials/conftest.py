"""A study with a budget of two trials, and workers that join it."""

from __future__ import annotations

from collections.abc import Iterator

import optuna
import pytest
import sqlalchemy as sa
from optuna.storages import BaseStorage

from hpsearch.storage.database.connect import make_engine
from hpsearch.storage.study_storage.storage import open_storage
from hpsearch.storage.trials.claims import Claims
from tests.storage.trials.support import Join, budget


@pytest.fixture
def engine(database_url: str) -> Iterator[sa.Engine]:
    engine = make_engine(database_url, application_name="test")
    yield engine
    engine.dispose()


@pytest.fixture
def storage(database_url: str) -> BaseStorage:
    return open_storage(database_url, application_name="test storage")


@pytest.fixture
def study_id(storage: BaseStorage) -> int:
    study_id = storage.create_new_study([optuna.study.StudyDirection.MAXIMIZE], "s")
    budget(storage, study_id, n_trials=2)
    return study_id


@pytest.fixture
def join(engine: sa.Engine, study_id: int) -> Join:
    """Return a function for another worker in this process, which counts as alive until its lease ends."""

    def make(lease: float = 60.0, *, may_be_preempted: bool = False) -> Claims:
        make.count += 1  # type: ignore[attr-defined]
        name = f"w{make.count}"  # type: ignore[attr-defined]
        preempted = {"may_be_preempted": may_be_preempted}
        return Claims(engine, study_id, worker=name, lease=lease, retry_seconds=10.0, **preempted)

    make.count = 0  # type: ignore[attr-defined]
    return make
