"""The storage against Optuna's own conformance suite."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

import pytest
from optuna.study import StudyDirection
from optuna.testing.pytest_storages import StorageTestCase

from hpsearch.storage.database.statements import Database
from hpsearch.storage.study_storage.storage import PostgresStorage, creating, open_storage


@pytest.fixture
def storage(database_url: str) -> Iterator[PostgresStorage]:
    opened = open_storage(database_url, application_name="test", retry_seconds=5)
    yield opened
    opened.engine.dispose()


class TestConformance(StorageTestCase):
    """All tests of the suite with the fixture `storage` above."""


def test_trials_that_start_in_the_same_microsecond_are_distinct(storage: PostgresStorage) -> None:
    study_id = storage.create_new_study([StudyDirection.MINIMIZE])
    start = datetime(2026, 1, 1, 12, 0, 0, 123456)
    database = Database(storage.engine, retry_seconds=10.0)
    made = [creating.create_trial(database, study_id, start, -1) for _ in range(2)]
    assert [number for _, number in made] == [0, 1]
    assert made[0] != made[1]
