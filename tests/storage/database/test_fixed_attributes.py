"""A worker's role cannot change the attributes of a study that commands use as paths and code."""

from __future__ import annotations

import json
from collections.abc import Iterator

import psycopg2
import pytest
from alembic import command
from alembic.config import Config
from optuna.study import StudyDirection

from hpsearch.search.study.control import extend_study
from hpsearch.search.study.study import load_study
from hpsearch.storage.attributes import CHECKPOINT_URL, FOLDER_NAME, SOURCE_SHA256, SPEC, STOPPED
from hpsearch.storage.database.connect import make_engine, open_cursor
from hpsearch.storage.database.migrate import MIGRATIONS, migrate
from hpsearch.storage.database.roles import WORKER
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
    with pytest.raises(psycopg2.errors.InsufficientPrivilege):
        execute(database_url, statement)
    assert storage.get_study_user_attrs(1) == FIXED
    execute(owner_url, statement)
    assert storage.get_study_user_attrs(1) != FIXED, "the owner may change them"


def test_temporary_tables_do_not_hide_studies_from_the_trigger(
    storage: PostgresStorage, database: str, database_url: str, owner_url: str
) -> None:
    """On a database whose owner did not revoke TEMPORARY from PUBLIC."""
    execute(owner_url, f"GRANT TEMPORARY ON DATABASE {database} TO {WORKER}")
    with pytest.raises(psycopg2.errors.InsufficientPrivilege):
        execute(database_url, "CREATE TEMPORARY TABLE studies (study_id int); DELETE FROM study_user_attributes")
    assert storage.get_study_user_attrs(1) == FIXED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({}, {"tensorboard": "/root/.ssh"}),
        ({"tensorboard": "/logs"}, {"tensorboard": None}),
        ({}, {"seed": 1}),
        ({}, {"retry_on": []}),
        ({"objective": "/own/objective.py:Own"}, {"objective": "digits"}),
        ({"objective": "objectives.wine:Wine"}, {"objective": "digits"}),
        ({"sampler": {"name": "tpe"}}, {"sampler": {"name": "random"}}),
        ({"sampler": {"name": "tpe"}}, {"sampler": None}),
        ({"sampler": {"name": "tpe"}}, {"sampler": {"name": "tpe", "multivariate": True}}),
        ({"sampler": {"name": "grid", "points": [1, 2]}}, {"sampler": {"name": "grid", "points": [2, 1, 3]}}),
        ({"objective": "objectives.wine:Wine"}, {"objective": "wine"}),
    ],
)
@pytest.mark.parametrize("is_missing", [False, True])
def test_settings_cannot_be_changed(
    storage: PostgresStorage, database_url: str, owner_url: str, old: dict, new: dict, *, is_missing: bool
) -> None:
    before = {**FIXED[SPEC], **old}
    if is_missing and "tensorboard" in new and not old:
        before.pop("tensorboard")  # as in a study of an earlier version
    execute(owner_url, f"UPDATE study_user_attributes SET value_json = {quote(before)} WHERE key = '{SPEC}'")
    with pytest.raises(psycopg2.errors.InsufficientPrivilege):
        execute(
            database_url, f"UPDATE study_user_attributes SET value_json = {quote(before | new)} WHERE key = '{SPEC}'"
        )
    assert storage.get_study_user_attrs(1)[SPEC] == before


SPECIAL_IDS = (
    "DELETE FROM study_directions; DELETE FROM study_user_attributes; DELETE FROM studies;"
    "INSERT INTO studies (study_id, study_name) VALUES (1, 's')",
    "INSERT INTO studies (study_id, study_name) VALUES (1, 's')",
    "SELECT setval('studies_study_id_seq', 1, false); INSERT INTO studies (study_name) VALUES ('s')",
    "INSERT INTO studies (study_id, study_name) VALUES (9, 's'); UPDATE studies SET study_id = 1 WHERE study_id = 9",
    "DELETE FROM hpsearch_study_ids; INSERT INTO studies (study_id, study_name) VALUES (1, 's')",
    "TRUNCATE hpsearch_study_ids",
    "INSERT INTO hpsearch_study_ids VALUES (9)",
    "UPDATE hpsearch_study_ids SET study_id = 9; INSERT INTO studies (study_id, study_name) VALUES (1, 's')",
    "SET session_replication_role = replica; INSERT INTO studies (study_id, study_name) VALUES (1, 's')",
    "CREATE TEMPORARY TABLE hpsearch_study_ids (study_id int);"
    "INSERT INTO studies (study_id, study_name) VALUES (1, 's')",
    "CREATE TEMPORARY TABLE mine (study_id int);"
    "CREATE TRIGGER mine AFTER INSERT ON mine FOR EACH ROW EXECUTE FUNCTION hpsearch_record_study_id();"
    "INSERT INTO mine VALUES (9)",
)


@pytest.mark.parametrize("attack", SPECIAL_IDS)
def test_the_id_of_a_deleted_study_does_not_return(
    storage: PostgresStorage, database: str, database_url: str, owner_url: str, attack: str
) -> None:
    execute(owner_url, f"GRANT TEMPORARY ON DATABASE {database} TO {WORKER}")
    if not attack.startswith("DELETE FROM study_directions"):
        storage.delete_study(1)
    with pytest.raises(psycopg2.errors.InsufficientPrivilege):
        execute(database_url, attack)
    assert storage.create_new_study([StudyDirection.MAXIMIZE], "another") not in {1, 9}


@pytest.mark.parametrize("isolation_level", ["READ COMMITTED", "REPEATABLE READ"])
def test_a_concurrent_deletion_does_not_release_an_id(
    storage: PostgresStorage, database_url: str, isolation_level: str
) -> None:
    with open_cursor(database_url, application_name="insertion") as second:
        second.execute(f"SET TRANSACTION ISOLATION LEVEL {isolation_level}")
        second.execute("SELECT count(*) FROM studies")  # takes the snapshot
        storage.delete_study(1)
        with pytest.raises((psycopg2.errors.InsufficientPrivilege, psycopg2.errors.SerializationFailure)):
            second.execute("INSERT INTO studies (study_id, study_name) VALUES (1, 's')")
        second.connection.rollback()


def test_a_migration_fixes_the_settings_and_ids_of_stored_studies(
    storage: PostgresStorage, database_url: str, owner_url: str
) -> None:
    attack = f"UPDATE study_user_attributes SET value_json = {{}} WHERE key = '{SPEC}'"
    downgrade(owner_url, "0009")
    execute(database_url, attack.format(quote(FIXED[SPEC] | {"tensorboard": "/logs"})))
    migrate(owner_url)
    with pytest.raises(psycopg2.errors.InsufficientPrivilege):
        execute(database_url, attack.format(quote(FIXED[SPEC] | {"tensorboard": "/root"})))
    assert storage.get_study_user_attrs(1)[SPEC]["tensorboard"] == "/logs"
    storage.delete_study(1)
    with pytest.raises(psycopg2.errors.InsufficientPrivilege):
        execute(database_url, "INSERT INTO studies (study_id, study_name) VALUES (1, 's')")


def test_a_migration_compares_options_of_samplers_exactly(
    storage: PostgresStorage, database_url: str, owner_url: str
) -> None:
    changed = FIXED[SPEC] | {"sampler": FIXED[SPEC]["sampler"] | {"another": 1}}
    attack = f"UPDATE study_user_attributes SET value_json = {quote(changed)} WHERE key = '{SPEC}'"
    downgrade(owner_url, "0010")
    execute(database_url, attack)
    execute(owner_url, f"UPDATE study_user_attributes SET value_json = {quote(FIXED[SPEC])} WHERE key = '{SPEC}'")
    migrate(owner_url)
    with pytest.raises(psycopg2.errors.InsufficientPrivilege):
        execute(database_url, attack)
    assert storage.get_study_user_attrs(1)[SPEC] == FIXED[SPEC]


def downgrade(owner_url: str, revision: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    engine = make_engine(owner_url, application_name="test")
    with engine.connect() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, revision)
    engine.dispose()


def test_a_worker_can_extend_a_study_of_an_earlier_version(storage: PostgresStorage, owner_url: str) -> None:
    before = {**FIXED[SPEC], "sampler": {"name": "tpe"}, "pruner": {"name": "median"}, "retries": 1}
    for key in ("tensorboard", "wandb", "finalists_of", "models", "retry_on"):
        before.pop(key)
    execute(owner_url, f"UPDATE study_user_attributes SET value_json = {quote(before)} WHERE key = '{SPEC}'")
    study = load_study(storage, "s")
    extend_study(study, "+5")
    assert study.attrs[SPEC] == before | {"n_trials": before["n_trials"] + 5}


def test_a_worker_can_extend_a_study_with_former_names(storage: PostgresStorage, owner_url: str) -> None:
    before = {**FIXED[SPEC], "sampler": {"name": "curves"}, "stop_when": 0.01}
    before.pop("min_expected_gain")
    execute(owner_url, f"UPDATE study_user_attributes SET value_json = {quote(before)} WHERE key = '{SPEC}'")
    study = load_study(storage, "s")
    extend_study(study, "+5")
    assert load_study(storage, "s").spec.min_expected_gain == before["stop_when"]
    assert study.attrs[SPEC] == before | {"n_trials": before["n_trials"] + 5}


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
