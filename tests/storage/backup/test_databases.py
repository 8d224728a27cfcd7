"""Backup and restore of databases: embedded and external, older, newer and non-empty, and adapted content."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg2
import pytest
from optuna.study import StudyDirection
from optuna.trial import TrialState

from hpsearch.search.services import DASHBOARD_COMMAND
from hpsearch.storage.attributes import (
    CHECKPOINT_URL,
    FOLDER_NAME,
    MODEL,
    RUN_ID,
    RUN_URL,
    SPEC,
    TRACKING,
    TRACKING_URI,
)
from hpsearch.storage.backup import adapt, archive
from hpsearch.storage.backup.backup import BackupResult, backup
from hpsearch.storage.backup.dumps import _make_connection_arguments, find_programs, run_program
from hpsearch.storage.backup.mlflow_tables import create_mlflow_tables, list_mlflow_tables
from hpsearch.storage.backup.restore import restore
from hpsearch.storage.backup.rows import find_other_relations
from hpsearch.storage.checkpoints.store import StoredFile
from hpsearch.storage.database.connect import check_database, open_cursor
from hpsearch.storage.database.migrate import migrate
from hpsearch.storage.database.roles import OWNER, WORKER
from hpsearch.storage.database.schema import RESTORE_SCHEMA
from hpsearch.storage.embedded.postgres_binaries import Binaries
from hpsearch.storage.errors import StorageError
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage
from hpsearch.storage.trials.claim_results import Claim
from hpsearch.storage.trials.claims import Claims
from tests.conftest import PostgresServer
from tests.full_disk import full_disk

OLD = Path(__file__).parents[2] / "search" / "study" / "database-0.1.0.sql"


@pytest.fixture
def home(tmp_path: Path) -> str:
    return str(tmp_path / "home")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "backup.tar"


@pytest.fixture
def other(postgres_server: PostgresServer) -> Iterator[str]:
    """Return the name of another database without tables."""
    name = f"restored_{os.getpid()}"
    postgres_server.execute("CREATE DATABASE {} OWNER {} TEMPLATE template0 STRATEGY file_copy", name, OWNER)
    yield name
    postgres_server.execute("DROP DATABASE {} WITH (FORCE)", name)


def execute(url: str, statement: str, *arguments: Any) -> list[Any]:
    connection = psycopg2.connect(url.replace("+psycopg2", ""))
    try:
        with connection, connection.cursor() as cursor:
            cursor.execute(statement, arguments or None)
            return cursor.fetchall() if cursor.description else []
    finally:
        connection.close()


def fill(url: str, checkpoint: StoredFile | None = None) -> PostgresStorage:
    """Create a study with a running trial that has reported an epoch."""
    storage = open_storage(url, application_name="test")
    study_id = storage.create_new_study([StudyDirection.MAXIMIZE], "wine")
    storage.set_study_user_attr(study_id, SPEC, {"n_trials": 3, "retries": 0})
    claims = Claims(storage.engine, study_id, worker="host:1")
    claim = claims.claim()
    assert isinstance(claim, Claim)
    claims.report(claim, 0, 0.5, checkpoint)
    return storage


def make(file: Path, owner_url: str, home: str, **more: Any) -> BackupResult:
    return backup(file, owner_url=owner_url, studies_only=True, home=home, **more, dashboard=DASHBOARD_COMMAND)


def test_restored_studies_equal_the_original_with_rights_and_waiting_trials(
    postgres_server: PostgresServer, owner_url: str, database_url: str, other: str, file: Path, home: str
) -> None:
    fill(database_url)
    made = make(file, owner_url, home)
    assert (made.manifest.studies, made.manifest.trials, made.manifest.has_mlflow) == (1, 1, False)
    restore(file, owner_url=postgres_server.url(other, user=OWNER), home=home, dashboard=DASHBOARD_COMMAND)
    storage = open_storage(postgres_server.url(other, user=WORKER), application_name="test")
    (study,) = storage.get_all_studies()
    (trial,) = storage.get_all_trials(study._study_id)
    assert (trial.state, trial.intermediate_values) == (TrialState.WAITING, {0: 0.5})
    for attempt in (2, 3):  # with no retries left: the restore must not count as a failure
        claim = Claims(storage.engine, study._study_id, worker="there:1").claim()
        assert isinstance(claim, Claim)
        assert (claim.number, claim.attempt) == ((0, attempt) if attempt == 2 else (1, 1))
    with pytest.raises(psycopg2.errors.InsufficientPrivilege):
        execute(postgres_server.url(other), "CREATE TABLE mine (a int)")
    storage.engine.dispose()


@pytest.mark.parametrize(
    "used",
    [
        *(f"{kind}/Wine-0123456789abcdef" for kind in ("runs", "outbox", "logs", "checkpoints")),  # ignoring case
        "runs/wine-1",  # would be that of a study without the attribute
    ],
)
def test_a_restored_study_does_not_share_the_folders_of_the_original(
    postgres_server: PostgresServer, owner_url: str, database_url: str, other: str, file: Path, home: str, used: str
) -> None:
    """`delete` of the restored study would remove the files of the original."""
    storage = fill(database_url)
    storage.set_study_user_attr(storage.get_study_id_from_name("wine"), FOLDER_NAME, "wine-0123456789abcdef")
    checkpoint = Path(home, "checkpoints", "wine-0123456789abcdef", "0000", "0001-1.pt")
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    make(file, owner_url, home)
    shutil.rmtree(checkpoint.parents[1])
    folder = Path(home, used)
    folder.mkdir()
    target = postgres_server.url(other, user=OWNER)
    for _ in range(2):  # the first try leaves a mark that permits to replace rows
        with pytest.raises(StorageError, match=f"{folder}' has files of a study .*; set --home to another folder"):
            restore(file, owner_url=target, home=home, dashboard=DASHBOARD_COMMAND)
    assert not checkpoint.parents[1].exists()
    folder.rmdir()
    restore(file, owner_url=target, home=home, dashboard=DASHBOARD_COMMAND)
    assert execute(target, "SELECT study_name FROM studies") == [("wine",)]


def test_a_backup_with_damaged_attributes_of_a_worker_is_restored(
    postgres_server: PostgresServer, owner_url: str, database_url: str, other: str, file: Path, home: str
) -> None:
    storage = fill(database_url)
    study_id, values = storage.get_study_id_from_name("wine"), ('"', "NaN", r'"\u0000"', r'"\ud800"', "7", '{"a": 1}')
    damaged = {key: storage.create_new_trial(study_id) for key in values}
    for value, trial_id in damaged.items():
        storage.set_trial_state_values(trial_id, TrialState.COMPLETE, [0.5])
        for key in (TRACKING, RUN_ID, RUN_URL):
            attr = "INSERT INTO trial_user_attributes (trial_id, key, value_json) VALUES (%s, %s, %s)"
            execute(database_url, attr, trial_id, key, value)
    for key in (RUN_ID, RUN_URL, TRACKING_URI, CHECKPOINT_URL):
        attr = "INSERT INTO study_user_attributes (study_id, key, value_json) VALUES (%s, %s, %s)"
        execute(database_url, attr, study_id, key, '"')
    make(file, owner_url, home)
    restore(file, owner_url=(target := postgres_server.url(other, user=OWNER)), home=home, dashboard=DASHBOARD_COMMAND)
    rows = execute(target, "SELECT key, value_json FROM trial_user_attributes WHERE key IN (%s, %s)", TRACKING, RUN_ID)
    assert rows == [(TRACKING, '"pending"')] * len(values)


def test_the_shards_of_a_checkpoint_are_in_the_backup(
    postgres_server: PostgresServer,
    owner_url: str,
    database_url: str,
    other: str,
    file: Path,
    home: str,
    tmp_path: Path,
) -> None:
    folder = Path(home, "checkpoints", "wine-1", "0000")
    folder.mkdir(parents=True)
    for name in ("0000-1.pt", "0000-1.pt.0_0.distcp", "0000-1.pt.metadata", "0001-1.pt.0_0.distcp"):
        (folder / name).write_text(name)
    fill(database_url, StoredFile(path := "wine-1/0000/0000-1.pt", "0" * 64, 9))
    # After a copy of the pruner pbt, two pointers have the same path.
    execute(database_url, "INSERT INTO hpsearch_checkpoints SELECT trial_id, 7, 1, %s, '', 9 FROM trials", path)
    make(file, owner_url, home)
    restore(
        file, owner_url=postgres_server.url(other, user=OWNER), home=str(tmp_path / "new"), dashboard=DASHBOARD_COMMAND
    )
    found = {path.name: path.read_text() for path in (tmp_path / "new" / "checkpoints").rglob("*") if path.is_file()}
    names = ("0000-1.pt", "0000-1.pt.0_0.distcp", "0000-1.pt.metadata")
    assert found == {name: name for name in names}, "and nothing that no pointer names"


def test_restore_overwrites_nothing(
    postgres_server: PostgresServer, owner_url: str, database_url: str, other: str, file: Path, home: str
) -> None:
    fill(database_url)
    make(file, owner_url, home)
    migrate(target := postgres_server.url(other, user=OWNER))
    execute(target, "INSERT INTO studies (study_name) VALUES ('precious')")
    with pytest.raises(
        StorageError, match=r"/restored_\d+.* is not empty \(studies: 1\), and restore overwrites nothing"
    ):
        restore(file, owner_url=target, home=home, dashboard=DASHBOARD_COMMAND)
    assert execute(target, "SELECT study_name FROM studies") == [("precious",)]
    with pytest.raises(StorageError, match="already exists; give another path, or --force"):
        make(file, owner_url, home)
    notes = file.with_name("notes.txt")
    notes.write_text("notes")
    with pytest.raises(StorageError, match="is not a backup, so --force does not replace it"):
        make(notes, owner_url, home, force=True)
    make(file, owner_url, home, force=True)


def test_restore_drops_no_tables_of_other_programs(
    postgres_server: PostgresServer, owner_url: str, database_url: str, other: str, file: Path, home: str
) -> None:
    fill(database_url)
    make(file, owner_url, home)
    execute(target := postgres_server.url(other, user=OWNER), "CREATE TABLE precious (a int)")
    with pytest.raises(
        StorageError, match=r"is not empty \(table of another program: precious\), and restore overwrites"
    ):
        restore(file, owner_url=target, home=home, dashboard=DASHBOARD_COMMAND)
    execute(target, "DROP TABLE precious; CREATE TYPE mood AS ENUM ('good'); CREATE DOMAIN small AS int")
    restore(file, owner_url=target, home=home, dashboard=DASHBOARD_COMMAND)
    assert execute(target, "SELECT 'good'::mood, 1::small") == [("good", 1)]


def test_the_tables_of_the_installed_mlflow_are_known(empty_database_url: str) -> None:
    create_mlflow_tables(empty_database_url, "heads")
    with open_cursor(empty_database_url, application_name="test") as cursor:
        assert find_other_relations(cursor, list_mlflow_tables()) == []


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO experiments (experiment_id, name) VALUES (1, 'traces')",
        "INSERT INTO webhooks (webhook_id, name, url, status, secret, creation_timestamp, last_updated_timestamp) "
        "VALUES ('w', 'w', 'http://h', 'ACTIVE', NULL, 0, 0)",
    ],
)
def test_restore_overwrites_no_content_of_mlflow(
    postgres_server: PostgresServer, owner_url: str, empty_database_url: str, other: str, file: Path, home: str,
    monkeypatch: pytest.MonkeyPatch, statement: str,
) -> None:  # fmt: skip
    create_mlflow_tables(empty_database_url, "heads")
    monkeypatch.setenv("MLFLOW_BACKEND_STORE_URI", empty_database_url)
    backup(file, owner_url=owner_url, home=home, files=False, dashboard=DASHBOARD_COMMAND)
    execute(empty_database_url, f"INSERT INTO experiments (experiment_id, name) VALUES (0, 'Default'); {statement}")
    with pytest.raises(StorageError, match=r"is not empty \((experiments|webhooks): 1\), and restore"):
        restore(file, owner_url=postgres_server.url(other, user=OWNER), home=home, dashboard=DASHBOARD_COMMAND)


class Killed(BaseException):
    """Simulates SIGKILL: no cleanup code catches it."""


@pytest.mark.parametrize(
    "where",
    [
        "restore_rows",
        *(
            pytest.param(w, marks=pytest.mark.soak)
            for w in ("migrate", "release_trials", "remove_home_checkpoint_urls")
        ),
    ],
)
def test_an_interrupted_restore_is_reported_and_repeated(
    postgres_server: PostgresServer, owner_url: str, database_url: str, other: str, file: Path, home: str, where: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fill(database_url)
    make(file, owner_url, home)
    target, workers = postgres_server.url(other, user=OWNER), postgres_server.url(other, user=WORKER)

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[restore.__module__], where, killed)
        with pytest.raises(Killed):
            restore(file, owner_url=target, home=home, dashboard=DASHBOARD_COMMAND)
    with pytest.raises(StorageError, match="a restore was interrupted; run the same 'hpsearch restore' again"):
        check_database(workers)
    restore(file, owner_url=target, home=home, dashboard=DASHBOARD_COMMAND)
    check_database(workers)
    storage = open_storage(workers, application_name="test")
    (study,) = storage.get_all_studies()
    assert [trial.state for trial in storage.get_all_trials(study._study_id)] == [TrialState.WAITING]
    storage.engine.dispose()
    with pytest.raises(StorageError, match="is not empty"):
        restore(file, owner_url=target, home=home, dashboard=DASHBOARD_COMMAND)


def test_a_repeated_restore_into_another_database_of_mlflow_overwrites_nothing(
    postgres_server: PostgresServer, owner_url: str, empty_database_url: str, other: str, file: Path, home: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    create_mlflow_tables(empty_database_url, "heads")
    monkeypatch.setenv("MLFLOW_BACKEND_STORE_URI", empty_database_url)
    backup(file, owner_url=owner_url, home=home, files=False, dashboard=DASHBOARD_COMMAND)
    target = postgres_server.url(other, user=OWNER)
    execute(target, f"CREATE SCHEMA {RESTORE_SCHEMA}")
    execute(empty_database_url, "INSERT INTO registered_models (name, workspace) VALUES ('m', 'default')")
    with pytest.raises(StorageError, match=r"is not empty \(registered models: 1\), and restore"):
        restore(file, owner_url=target, home=home, dashboard=DASHBOARD_COMMAND)
    execute(empty_database_url, f"CREATE SCHEMA {RESTORE_SCHEMA}")
    restore(file, owner_url=target, home=home, dashboard=DASHBOARD_COMMAND)
    for url in (target, empty_database_url):
        assert execute(url, f"SELECT to_regnamespace('{RESTORE_SCHEMA}')") == [(None,)]


def test_a_worker_cannot_prevent_a_backup(owner_url: str, database_url: str, file: Path, home: str) -> None:
    """It can create large objects, and write pointers to folders."""
    fill(database_url, StoredFile("wine-1/0000/0000-1.pt", "0" * 64, 9))
    Path(home, "checkpoints", "wine-1", "0000", "0000-1.pt").mkdir(parents=True)
    execute(database_url, "SELECT lo_from_bytea(0, 'x')")
    execute(database_url, "INSERT INTO hpsearch_checkpoints SELECT trial_id, 7, 1, '.', '', 0 FROM trials LIMIT 1")
    path = f"{'a' * 300}/0000/0000-1.pt"
    execute(database_url, "INSERT INTO hpsearch_checkpoints SELECT trial_id, 8, 1, %s, '', 0 FROM trials LIMIT 1", path)
    assert make(file, owner_url, home).manifest.studies == 1


def test_backup_writes_only_files_and_removes_old_leftovers(owner_url: str, tmp_path: Path, home: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name, said in (
        ("fifo", "is not a regular file"),
        ("a" * 300, "too long"),
    ):
        with pytest.raises(StorageError, match=said):
            make(tmp_path / name, owner_url, home, force=True)
    old, young, other = (tmp_path / f".b.tar-{name}" for name in ("hpsearch-old", "hpsearch-young", "of-the-user"))
    for left in (old, young, other):
        left.touch()
    folder = tmp_path / ".b.tar-hpsearch-folder"  # another user can give this name to a folder of the owner
    folder.mkdir()
    for left in (old, other, folder):
        os.utime(left, (0, 0))
    make(tmp_path / "b.tar", owner_url, home)
    assert [left.exists() for left in (old, young, other, folder)] == [False, True, True, True]
    assert (tmp_path / "b.tar").stat().st_mode & 0o777 == 0o600, "it holds users' data"


def test_others_with_access_to_the_folder_cannot_redirect_a_backup(owner_url: str, tmp_path: Path, home: str) -> None:
    folder, secret = tmp_path / "team", tmp_path / "secret"
    folder.mkdir()
    secret.write_text("kept")

    def replace_entries(_line: str) -> None:  # as another user with write permission for the folder can
        for path in folder.iterdir():
            path.rename(tmp_path / uuid.uuid4().hex)
            path.symlink_to(secret)

    backup(
        folder / "b.tar",
        owner_url=owner_url,
        home=home,
        studies_only=True,
        dashboard=DASHBOARD_COMMAND,
        progress=replace_entries,
    )
    assert secret.read_text() == "kept"


def test_a_backup_on_a_full_disk_names_the_remedy_and_leaves_no_file(
    owner_url: str, database_url: str, file: Path, home: str
) -> None:
    fill(database_url).engine.dispose()
    size = make(file, owner_url, home).size
    with full_disk(size - 1), pytest.raises(StorageError, match="no backup was made; free disk space"):
        make(file.with_name("other.tar"), owner_url, home)
    assert [path.name for path in file.parent.iterdir() if path.name != "home"] == [file.name]


def test_restored_tables_of_an_older_version_are_migrated(
    postgres_server: PostgresServer, empty_database_url: str, other: str, file: Path, home: str
) -> None:
    execute(empty_database_url, OLD.read_text())
    made = make(file, empty_database_url, home)
    migrate(target := postgres_server.url(other, user=OWNER))  # they replace newer tables if all of these are empty
    restore(file, owner_url=target, home=home, dashboard=DASHBOARD_COMMAND)
    (revision,) = execute(target, "SELECT version_num FROM hpsearch_alembic_version")[0]
    assert (made.manifest.schema or "") < revision
    assert execute(target, "SELECT count(*) FROM studies") == [(made.manifest.studies,)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": "0999"}, r"newer hpsearch \(schema 0999"),
        ({"optuna_schema": "v9"}, r"newer Optuna \(schema v9"),
        ({"mlflow_schema": "zz"}, r"newer MLflow \(schema zz"),
        ({"postgres": "99.1"}, "from Postgres 99.1, but the server is Postgres 18"),
        ({"dumped_by": "99.1"}, "the backup needs pg_dump and pg_restore 99 or newer"),
    ],
)
def test_a_backup_of_newer_versions_is_rejected_before_any_change(
    postgres_server: PostgresServer,
    owner_url: str,
    other: str,
    file: Path,
    home: str,
    change: dict[str, str],
    said: str,
) -> None:
    made = make(file, owner_url, home)
    altered = file.with_name("altered.tar")
    with tarfile.open(file) as old, tarfile.open(altered, "w") as new:
        for member in old:
            content = old.extractfile(member)
            assert content is not None
            data = content.read()
            if member.name == archive.MANIFEST:
                data = json.dumps({**made.manifest.to_dict(), **change}).encode()
                member.size = len(data)
            new.addfile(member, io.BytesIO(data))
    target = postgres_server.url(other, user=OWNER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_BACKEND_STORE_URI", target)
        with pytest.raises(StorageError, match=said):
            restore(altered, owner_url=target, home=home, dashboard=DASHBOARD_COMMAND)
    assert execute(target, "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == [(0,)]


def test_backup_and_restore_need_explicit_services(file: Path, home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "postgresql://ann:secret@127.0.0.1:1/optuna"
    with pytest.raises(StorageError, match="contains no embedded services; give another --home"):
        backup(file, home=home, dashboard=DASHBOARD_COMMAND)
    with pytest.raises(StorageError, match="MLFLOW_BACKEND_STORE_URI is not set"):
        backup(file, owner_url=url, home=home, dashboard=DASHBOARD_COMMAND)
    monkeypatch.setenv("MLFLOW_BACKEND_STORE_URI", url)
    with pytest.raises(StorageError, match="--artifacts is missing"):
        backup(file, owner_url=url, home=home, dashboard=DASHBOARD_COMMAND)
    with pytest.raises(
        StorageError, match="--artifacts 's3://bucket' is not a local folder; give one, or --no-artifacts"
    ):
        backup(file, owner_url=url, home=home, artifacts="s3://bucket", dashboard=DASHBOARD_COMMAND)
    monkeypatch.setenv("HPSEARCH_STORAGE_URL", url)
    with pytest.raises(StorageError, match="HPSEARCH_STORAGE_URL is set, but HPSEARCH_OWNER_URL is not"):
        backup(file, home=home, dashboard=DASHBOARD_COMMAND)
    assert not file.exists()


def test_passwords_are_not_on_command_lines() -> None:
    url = "postgresql://ann:se%2Fcret@db:5432/optuna?sslmode=require&sslpassword=key"
    arguments, environment = _make_connection_arguments(url)
    assert arguments == ["--no-password", "--dbname=postgresql://ann@db:5432/optuna?sslmode=require"]
    assert environment["PGPASSWORD"] == "se/cret"


def test_a_server_newer_than_pg_dump_is_an_error_with_a_remedy() -> None:
    with pytest.raises(StorageError, match=r"the server needs pg_dump .*; install postgresql-client-99"):
        find_programs(99, why="the server")


# The columns of MLflow's tables that the tested code uses.
_MLFLOW = """
    CREATE TABLE runs (run_uuid text, status text, lifecycle_stage text DEFAULT 'active', deleted_time bigint);
    CREATE TABLE tags (run_uuid text, key text, value text);
    CREATE TABLE model_versions (run_id text, description text);
"""


def add_run(url: str, run: str, status: str, **tags: str) -> None:
    execute(url, "INSERT INTO runs (run_uuid, status) VALUES (%s, %s)", run, status)
    for key, value in tags.items():
        name = key.replace("__", ".")
        execute(url, "INSERT INTO tags VALUES (%s, %s, %s)", run, name, value)


def test_later_records_of_mlflow_do_not_break_a_restore(
    postgres_server: PostgresServer, owner_url: str, database_url: str, other: str
) -> None:
    storage = open_storage(database_url, application_name="test")
    study_id = storage.create_new_study([StudyDirection.MAXIMIZE], "wine")
    storage.set_study_user_attr(study_id, RUN_ID, "parent")
    for _ in range(2):
        trial = storage.create_new_trial(study_id)
        storage.set_trial_user_attr(trial, TRACKING, "pending: records not yet sent from host")
        storage.set_trial_state_values(trial, TrialState.COMPLETE, [0.5])
    finalists = storage.create_new_study([StudyDirection.MAXIMIZE], "wine.finalists")
    storage.set_study_user_attr(finalists, RUN_ID, "parent")
    storage.create_new_trial(finalists)
    execute(target := postgres_server.url(other, user=OWNER), _MLFLOW)
    mine = {"hpsearch__study": "wine", "mlflow__parentRunId": "parent"}
    theirs_too = {"hpsearch__study": "wine.finalists", "mlflow__parentRunId": "parent"}
    add_run(target, "finalist", "FINISHED", hpsearch__trial="0", **theirs_too)
    add_run(target, "later finalist", "RUNNING", hpsearch__trial="1", **theirs_too)
    add_run(target, "whole", "FINISHED", hpsearch__trial="0", hpsearch__model_id="m-1", **mine)
    add_run(target, "halfway", "RUNNING", hpsearch__trial="1", **mine)
    add_run(target, "later", "RUNNING", hpsearch__trial="2", **mine)
    add_run(
        target, "of-a-deleted-study", "RUNNING", hpsearch__trial="7", hpsearch__study="wine", mlflow__parentRunId="x"
    )
    with (
        psycopg2.connect(owner_url.replace("+psycopg2", "")) as ours,
        psycopg2.connect(target.replace("+psycopg2", "")) as theirs,
    ):
        adapt.reconcile_databases(ours.cursor(), theirs.cursor())
        assert adapt.find_studies_with_unsent_trials(ours.cursor()) == ["wine"]
    ours.close()
    theirs.close()
    deleted = execute(target, "SELECT run_uuid FROM runs WHERE lifecycle_stage = 'deleted' ORDER BY run_uuid")
    assert deleted == [("later",), ("later finalist",)], "finalists have the same parent run, and numbers of their own"
    first, second = storage.get_all_trials(study_id)
    assert (first.user_attrs[RUN_ID], first.user_attrs[MODEL]) == ("whole", "m-1")
    assert TRACKING not in first.user_attrs, "it is there: no worker has to send it again"
    assert TRACKING in second.user_attrs, "it is not: sync makes it from its checkpoint"
    storage.engine.dispose()


def test_links_and_checkpoint_paths_are_changed_to_the_new_home(
    owner_url: str, database_url: str, postgres_server: PostgresServer, other: str
) -> None:
    storage = open_storage(database_url, application_name="test")
    page = "http://127.0.0.1:4000/#/experiments/1/runs/r?x"
    for name, url in (("a", "file:///old/home/checkpoints"), ("b", "/old/home/checkpoints"), ("c", "s3://bucket")):
        study_id = storage.create_new_study([StudyDirection.MAXIMIZE], name)
        storage.set_study_user_attr(study_id, CHECKPOINT_URL, url)
        storage.set_study_user_attr(study_id, RUN_URL, page)
        storage.set_study_user_attr(study_id, TRACKING_URI, "http://127.0.0.1:4000")
        storage.set_study_system_attr(study_id, "dashboard:note_str:0", f"see [it]({page}).")
    execute(target := postgres_server.url(other, user=OWNER), _MLFLOW)
    execute(target, "INSERT INTO model_versions VALUES ('r', %s)", f"[trial 1]({page})")
    with (
        psycopg2.connect(owner_url.replace("+psycopg2", "")) as ours,
        psycopg2.connect(target.replace("+psycopg2", "")) as theirs,
    ):
        assert adapt.remove_home_checkpoint_urls(ours.cursor(), "/old/home") == [("c", "s3://bucket")]
        adapt.rewrite_mlflow_urls(
            ours.cursor(), theirs.cursor(), tracking_uri="http://mlflow:5000", ui_url="https://mlflow.example.com/"
        )
    ours.close()
    theirs.close()
    new = "https://mlflow.example.com/#/experiments/1/runs/r?x"
    for study in storage.get_all_studies():
        assert (study.user_attrs[RUN_URL], study.user_attrs[TRACKING_URI]) == (new, "http://mlflow:5000")
        assert study.system_attrs["dashboard:note_str:0"] == f"see [it]({new})."
        assert (CHECKPOINT_URL in study.user_attrs) == (study.study_name == "c")
    assert execute(target, "SELECT description FROM model_versions") == [(f"[trial 1]({new})",)]
    storage.engine.dispose()


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        ("exit 7", "failed: exit code 7"),
        ("kill -KILL $$", "failed: ended by SIGKILL"),
        ("kill -XFSZ $$", "failed: ended by SIGXFSZ; a file exceeds the limit of file sizes; raise it with ulimit -f"),
    ],
)
def test_the_end_of_a_program_is_described(tmp_path: Path, ending: str, message: str) -> None:
    program = tmp_path / "pg_dump"
    program.write_text(f"#!/bin/sh\n{ending}\n")
    program.chmod(0o755)
    with pytest.raises(StorageError) as error:
        run_program(Binaries(tmp_path, "18.6"), "pg_dump")
    assert str(error.value) == f"pg_dump 18.6 {message}"
