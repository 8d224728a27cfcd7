"""The storage against Optuna's own conformance suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from optuna.testing.pytest_storages import StorageTestCase

from storage.studies import open_storage
from storage.study_storage import PostgresStorage


@pytest.fixture
def storage(database_url: str) -> Iterator[PostgresStorage]:
    opened = open_storage(database_url, application_name="test", patience=5)
    yield opened
    opened.engine.dispose()


class TestConformance(StorageTestCase):
    """Every test of the suite, with `storage` above."""
