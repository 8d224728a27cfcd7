"""A study of three trials, its claims, and commands on its database."""

from __future__ import annotations

import optuna
import pytest

from hpsearch.search.cli import run_command
from hpsearch.search.study.study import StoredStudy, load_study
from hpsearch.storage.attributes import SPEC
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage
from hpsearch.storage.trials.claims import Claims
from tests.factories import spec_of
from tests.search.study.steering.support import Say


@pytest.fixture
def storage(database_url: str) -> PostgresStorage:
    return open_storage(database_url, application_name="test")


@pytest.fixture
def study(storage: PostgresStorage) -> optuna.Study:
    study = optuna.create_study(study_name="s", direction="maximize", storage=storage)
    spec = spec_of(name="successive_halving", reduction_factor=2)
    storage.set_study_user_attr(study._study_id, SPEC, {**spec.model_dump(), "n_trials": 3, "retries": 1})
    return study


@pytest.fixture
def stored(study: optuna.Study, storage: PostgresStorage) -> StoredStudy:
    return load_study(storage, "s")


@pytest.fixture
def claims(study: optuna.Study, storage: PostgresStorage) -> Claims:
    return Claims(storage.engine, study._study_id, worker="host:1")


@pytest.fixture
def say(database_url: str, capsys: pytest.CaptureFixture[str]) -> Say:
    """Return a function that runs a command on the study and returns its output, or its error line for `code` 2."""

    def run(*arguments: str, code: int = 0) -> str:
        assert run_command([*arguments, "--storage-url", database_url]) == code
        captured = capsys.readouterr()
        if code:
            assert captured.err.count("\n") == 1, captured.err
            assert captured.err.startswith("hpsearch: ")
        return captured.err if code else captured.out

    return run
