"""A finished search of five trials."""

from __future__ import annotations

import pytest

from hpsearch.search.cli import run_command
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage
from tests.search.finalists.support import VALUES, Say, finished, search


@pytest.fixture
def storage(database_url: str) -> PostgresStorage:
    return open_storage(database_url, application_name="test")


@pytest.fixture
def study(storage: PostgresStorage) -> StoredStudy:
    return search(storage, "s", [finished(n, v) for n, v in enumerate(VALUES)])


@pytest.fixture
def say(database_url: str, capsys: pytest.CaptureFixture[str]) -> Say:
    def run(*arguments: str, code: int = 0) -> str:
        assert run_command([*arguments, "--storage-url", database_url]) == code
        captured = capsys.readouterr()
        assert captured.err.count("\n") == (1 if code else 0), captured.err
        return captured.err if code else captured.out

    return run
