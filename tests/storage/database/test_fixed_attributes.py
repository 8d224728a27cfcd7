"""A worker's role cannot change the attributes of a study that commands use as paths and code."""

from __future__ import annotations

import json
from collections.abc import Iterator

import psycopg2
import pytest
from optuna.study import StudyDirection

from hpsearch.search.study.control import extend_study
from hpsearch.search.study.study import load_study
from hpsearch.storage.attributes import CHECKPOINT_URL, FOLDER_NAME, SOURCE_SHA256, SPEC, STOPPED
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage
from tests.conftest import execute
from tests.factories import spec_of

FIXED = {
    SPEC: spec_of(name="none").model_dump(),
    FOLDER_NAME: "s-0123456789abcdef",
    CHECKPOINT_URL: "/shared/checkpoints",
    SOURCE_SHA256: "0" * 64,
}


@pytest.fixture
def storage(database_url: str) -> Iterator[PostgresStorage]:
    storage = open_storage(database_url, application_name="worker")
    study_id = storage.create_new_study([StudyDirection.MAXIMIZE], "s")
    for key, value in FIXED.items():
        storage.set_study_user_attr(study_id, key, value)
    yield storage
    storage.engine.dispose()


def quote(value: object) -> str:
    return "'" + json.dumps(value).replace("'", "''") + "'"


@pytest.mark.parametrize("key", FIXED)
@pytest.mark.parametrize(
    "attack",
    [
        "UPDATE study_user_attributes SET value_json = {new} WHERE key = '{key}'",
        "DELETE FROM study_user_attributes WHERE key = '{key}'",
        "UPDATE study_user_attributes SET key = 'other' WHERE key = '{key}'",
        "UPDATE study_user_attributes SET study_id = 2 WHERE key = '{key}'",
        "DELETE FROM study_user_attributes WHERE key = '{key}';"
        "INSERT INTO study_user_attributes (study_id, key, value_json) VALUES (1, '{key}', {new})",
        "SET CONSTRAINTS ALL DEFERRED; UPDATE study_user_attributes SET value_json = {new} WHERE key = '{key}'",
        "SET search_path = pg_catalog; DELETE FROM public.study_user_attributes WHERE key = '{key}'",
    ],
)
def test_fixed_attributes_cannot_be_changed(
    storage: PostgresStorage, database_url: str, owner_url: str, key: str, attack: str
) -> None:
    storage.create_new_study([StudyDirection.MAXIMIZE], "another")
    new = {**FIXED[SPEC], "objective": "/tmp/evil.py:Digits"} if key == SPEC else "elsewhere"
    statement = attack.format(key=key, new=quote(new))
    with pytest.raises((psycopg2.errors.InsufficientPrivilege, psycopg2.errors.UndefinedTable)):
        execute(database_url, statement)
    assert storage.get_study_user_attrs(1) == FIXED
    if "search_path" not in attack:
        execute(owner_url, statement)
        assert storage.get_study_user_attrs(1) != FIXED, "the owner may change them"


def test_a_worker_can_extend_and_delete_a_study(storage: PostgresStorage) -> None:
    study = load_study(storage, "s")
    extend_study(study, "+5")
    study.set_attr(STOPPED, "by me")
    study.set_attr(STOPPED, None)
    for key, value in FIXED.items():
        if key != SPEC:
            study.set_attr(key, value)
    assert study.budget == FIXED[SPEC]["n_trials"] + 5
    storage.delete_study(study.study_id)
    assert storage.get_all_studies() == []
