"""Attacks by the author of a backup file."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from optuna.study import StudyDirection

from hpsearch.search.cli import run_command
from hpsearch.search.services import DASHBOARD_COMMAND
from hpsearch.storage.attributes import RESTORED, SOURCE_SHA256, SPEC
from hpsearch.storage.backup.adapt import _LOCATIONS, delete_acting_rows, replace_artifact_locations
from hpsearch.storage.backup.archive import CHECKPOINTS, STUDIES_DUMP, ArchiveReader, create_archive
from hpsearch.storage.backup.backup import backup
from hpsearch.storage.backup.dumps import open_snapshot
from hpsearch.storage.backup.mlflow_tables import create_mlflow_tables, upgrade_mlflow
from hpsearch.storage.backup.restore import restore
from hpsearch.storage.backup.rows import restore_rows
from hpsearch.storage.database.connect import open_cursor
from hpsearch.storage.database.roles import OWNER, WORKER
from hpsearch.storage.errors import StorageError
from hpsearch.storage.files import compute_sha256
from hpsearch.storage.study_storage.storage import open_storage
from tests.conftest import PostgresServer
from tests.factories import spec_of

EVIL = "from pathlib import Path\nPath(__file__).with_name('imported').touch()\n"


@contextmanager
def create_database(server: PostgresServer, name: str) -> Iterator[str]:
    server.execute("CREATE DATABASE {} OWNER {} TEMPLATE template0 STRATEGY file_copy", name, OWNER)
    yield name
    server.execute("DROP DATABASE {} WITH (FORCE)", name)


@pytest.fixture
def other(postgres_server: PostgresServer) -> Iterator[str]:
    """Return the name of a database without tables, into which the victim restores."""
    with create_database(postgres_server, f"untrusted_{os.getpid()}") as name:
        yield name


@pytest.fixture(scope="module")
def mlflow_url(postgres_server: PostgresServer) -> Iterator[str]:
    """Return the URL of a database with empty tables of MLflow."""
    with create_database(postgres_server, f"mlflow_{os.getpid()}") as name:
        create_mlflow_tables(url := postgres_server.url(name, user=OWNER), "heads")
        yield url


@pytest.fixture
def mlflow_cursor(mlflow_url: str) -> Iterator[Any]:
    """Return a cursor of MLflow's tables in a transaction that is rolled back."""
    with open_cursor(mlflow_url, application_name="test") as cursor:
        yield cursor
        cursor.connection.rollback()


def make_backup(
    file: Path,
    owner_url: str,
    database_url: str,
    objective: str,
    files: dict[str, Path],
    *,
    change: Callable[[Path], None] = lambda _: None,
) -> None:
    """Write a backup with a study of this objective, a changed dump, and these files below its checkpoints."""
    storage = open_storage(database_url, application_name="attacker")
    study_id = storage.create_new_study([StudyDirection.MAXIMIZE], "s")
    storage.set_study_user_attr(study_id, SPEC, {**spec_of(name="none").model_dump(), "objective": objective})
    for source in files.values():
        storage.set_study_user_attr(study_id, SOURCE_SHA256, compute_sha256(source))
    storage.engine.dispose()
    honest, folder = file.with_name("honest.tar"), file.with_name("unpacked")
    home = str(file.with_name("attacker"))
    backup(honest, owner_url=owner_url, studies_only=True, home=home, dashboard=DASHBOARD_COMMAND)
    folder.mkdir()
    with ArchiveReader.open(honest) as reader, file.open("wb") as tar, create_archive(tar) as writer:
        reader.unpack(folder, progress=lambda _: None)
        change(folder / STUDIES_DUMP)
        writer.write_manifest(reader.manifest)
        writer.add_file(STUDIES_DUMP, folder / STUDIES_DUMP)
        for name, source in files.items():
            writer.add_file(CHECKPOINTS + name, source)
        writer.write_index()


def restore_there(file: Path, server: PostgresServer, other: str, home: Path) -> None:
    url = server.url(other, user=OWNER)
    restore(file, owner_url=url, home=str(home), dashboard=DASHBOARD_COMMAND)


def test_restore_places_only_files_with_names_of_checkpoints(
    owner_url: str, database_url: str, postgres_server: PostgresServer, other: str, tmp_path: Path
) -> None:
    source = tmp_path / "content"
    source.write_text(EVIL)
    good = ("s-1/0000/0001-1.pt", "s-1/0000/0001.120-1.pt", "s-1/0000/0001-1.pt.0_0.distcp")
    bad = ("x/evil.py", "evil.py", "s-1/0000/0001-1.pt.py", "s-1/0000/evil.pt/__init__.py", "s-1/0000/0001-1.pt.so")
    make_backup(tmp_path / "b.tar", owner_url, database_url, "digits", dict.fromkeys([*good, *bad], source))
    restore_there(tmp_path / "b.tar", postgres_server, other, tmp_path / "home")
    root = tmp_path / "home" / "checkpoints"
    assert {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()} == set(good)


def test_restore_places_only_files_with_paths_of_artifacts(
    owner_url: str,
    empty_database_url: str,
    postgres_server: PostgresServer,
    other: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create_mlflow_tables(empty_database_url, "heads")
    run, model = "0123456789abcdef" * 2, f"models/m-{'0123456789abcdef' * 2}"
    good = (f"1/{run}/artifacts/a.txt", f"1/{model}/artifacts/code/a.py", f"own/place/{run}/artifacts/b/c")
    for name in (*good, "evil.py", ".profile", "1/evil.py", f"1/{run}/evil.py", "artifacts/x/artifacts/evil.py"):
        path = tmp_path / "attacker" / "artifacts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(EVIL)
    monkeypatch.setenv("MLFLOW_BACKEND_STORE_URI", empty_database_url)
    backup(
        tmp_path / "b.tar",
        owner_url=owner_url,
        artifacts=str(tmp_path / "attacker" / "artifacts"),
        home=str(tmp_path / "attacker"),
        dashboard=DASHBOARD_COMMAND,
    )
    folder = tmp_path / "artifacts"
    lines: list[str] = []
    with create_database(postgres_server, f"untrusted_mlflow_{os.getpid()}") as mlflow:
        monkeypatch.setenv("MLFLOW_BACKEND_STORE_URI", postgres_server.url(mlflow, user=OWNER))
        restore(
            tmp_path / "b.tar",
            owner_url=postgres_server.url(other, user=OWNER),
            artifacts=str(folder),
            home=str(tmp_path / "home"),
            dashboard=DASHBOARD_COMMAND,
            progress=lines.append,
        )
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == set(good)
    assert "skipping 5 files that are not artifacts of a run, model or trace" in lines


@pytest.mark.parametrize("place", ["home", "elsewhere"])
def test_the_objective_of_a_backup_is_not_imported(
    owner_url: str,
    database_url: str,
    postgres_server: PostgresServer,
    other: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: str,
) -> None:
    """The backup places the file with the code, and its study refers to this file, with the right hash."""
    source = tmp_path / "evil.py"
    source.write_text(EVIL)
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(tmp_path))
    if place == "home":
        reference, imported = "~/home/checkpoints/x/evil.py:Digits", home / "checkpoints" / "x" / "imported"
    else:  # an artifact of MLflow, for example
        reference, imported = f"{source}:Digits", tmp_path / "imported"
    make_backup(tmp_path / "b.tar", owner_url, database_url, reference, {"x/evil.py": source})
    restore_there(tmp_path / "b.tar", postgres_server, other, home)
    monkeypatch.setenv("HPSEARCH_STORAGE_URL", url := postgres_server.url(other, user=WORKER))
    monkeypatch.setenv("HPSEARCH_HOME", str(home))
    for command in ("doctor s", "doctor s --import-objective", "worker --study s --tracking-uri http://127.0.0.1:1"):
        assert run_command(command.split()) != 0
        assert not imported.exists(), command
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    if place == "elsewhere":
        assert "because the study was restored from a backup; if you trust this code, confirm it" in captured.err

        monkeypatch.setattr("sys.stdin", io.StringIO())
        assert run_command(["trust", "s"]) == 2, "stdin is no terminal"
        assert run_command(["trust", "s", "--yes"]) == 0
        assert not imported.exists()
        assert open_storage(url, application_name="test").get_study_user_attrs(1)[RESTORED] is None
        run_command(["doctor", "s", "--import-objective"])
        assert imported.exists()


# Each statement changes the database of the attacker, and so its dump.
_HOSTILE_OBJECTS = """
    CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN IF NEW.key = 'hpsearch:restored' THEN RETURN NULL; END IF; RETURN NEW; END $$;
    CREATE TRIGGER keep BEFORE INSERT OR UPDATE ON study_user_attributes FOR EACH ROW EXECUTE FUNCTION keep();
    ALTER TABLE study_user_attributes ENABLE ALWAYS TRIGGER keep;
    CREATE FUNCTION run() RETURNS int LANGUAGE plpgsql AS $$
        BEGIN IF current_user = 'hpsearch_owner' THEN CREATE TABLE public.ran (); END IF; RETURN 1; END $$;
    ALTER TABLE studies DISABLE TRIGGER USER;
    ALTER TABLE studies ADD CONSTRAINT runs CHECK (public.run() = 1);
    ALTER TABLE hpsearch_workers ALTER COLUMN host SET DEFAULT run()::text;
    CREATE RULE also AS ON UPDATE TO studies DO ALSO SELECT run();
    ALTER TABLE trials ENABLE ROW LEVEL SECURITY;
    CREATE POLICY hidden ON trials USING (run() = 0);
    CREATE VIEW seen AS SELECT run();
    CREATE TABLE own (a int); INSERT INTO own VALUES (1);
"""
# Everything in the database that Postgres runs or evaluates, except the keys and the columns' types.
_CODE = """
    SELECT 'function ' || proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace
    UNION SELECT 'trigger ' || tgname FROM pg_trigger WHERE NOT tgisinternal
    UNION SELECT 'rule ' || rulename FROM pg_rules WHERE schemaname = 'public'
    UNION SELECT 'policy ' || polname FROM pg_policy
    UNION SELECT 'row security ' || relname FROM pg_class WHERE relrowsecurity
    UNION SELECT 'check ' || conname FROM pg_constraint WHERE contype = 'c' AND connamespace = 'public'::regnamespace
    UNION SELECT 'default ' || pg_get_expr(adbin, adrelid) FROM pg_attrdef
    UNION SELECT relkind::text || ' ' || relname FROM pg_class WHERE relnamespace = 'public'::regnamespace
"""


def query(url: str, statement: str) -> list[Any]:
    with open_cursor(url, application_name="test") as cursor:
        cursor.execute(statement)
        return cursor.fetchall() if cursor.description else []


def forge(dump: Path, pattern: bytes, statement: bytes) -> None:
    """Replace a statement in the table of contents of a dump by another one."""
    content = dump.read_bytes()
    (found,) = re.findall(pattern, content)
    dump.write_bytes(content.replace(found, statement.ljust(len(found) - 1) + b"\n"))


def test_the_sql_of_a_dump_does_not_run(
    owner_url: str, database_url: str, postgres_server: PostgresServer, other: str, tmp_path: Path
) -> None:
    clean = {name for (name,) in query(owner_url, _CODE)}
    query(owner_url, _HOSTILE_OBJECTS)
    make_backup(tmp_path / "b.tar", owner_url, database_url, "digits", {})
    restore_there(tmp_path / "b.tar", postgres_server, other, tmp_path / "home")
    target = postgres_server.url(other, user=OWNER)
    assert {name for (name,) in query(target, _CODE)} == clean
    storage = open_storage(target, application_name="test")
    (study,) = storage.get_all_studies()
    assert (study.study_name, study.user_attrs[RESTORED]) == ("s", True)
    assert query(target, "SELECT study_id FROM hpsearch_study_ids") == [(study._study_id,)]
    assert storage.create_new_study([StudyDirection.MAXIMIZE]) == study._study_id + 1
    storage.engine.dispose()


@pytest.mark.parametrize(
    ("pattern", "statement", "said"),
    [
        (
            rb"SELECT pg_catalog.setval\('public.studies_study_id_seq'[^\n]*\n",
            b"CREATE TABLE public.forged(); --",
            None,
        ),
        (rb"COPY public.studies [^\n]*\n", b"CREATE TABLE public.forged(); --", "is not present in table"),
    ],
)
def test_forged_statements_of_a_dump_do_not_run(
    owner_url: str,
    database_url: str,
    postgres_server: PostgresServer,
    other: str,
    tmp_path: Path,
    pattern: bytes,
    statement: bytes,
    said: str | None,
) -> None:
    """pg_restore prints the statements of an entry for rows or a counter as they are."""

    def change(dump: Path) -> None:
        forge(dump, pattern, statement)

    make_backup(tmp_path / "b.tar", owner_url, database_url, "digits", {}, change=change)
    with nullcontext() if said is None else pytest.raises(StorageError, match=said) as raised:
        restore_there(tmp_path / "b.tar", postgres_server, other, tmp_path / "home")
    assert raised is None or "\n" not in str(raised.value)
    target = postgres_server.url(other, user=OWNER)
    assert query(target, "SELECT to_regclass('forged')") == [(None,)]
    assert query(target, "SELECT count(*) FROM study_user_attributes WHERE key = 'hpsearch:restored'") == [
        (0 if said else 1,)
    ]


def test_an_operator_of_another_user_in_the_target_does_not_run(
    owner_url: str, database_url: str, postgres_server: PostgresServer, other: str, tmp_path: Path
) -> None:
    """As in a database of Postgres 14 or earlier, where every user may create operators."""
    target = postgres_server.url(other, user=OWNER)
    query(target, f"GRANT CREATE ON SCHEMA public TO {WORKER}; GRANT CONNECT ON DATABASE {other} TO {WORKER}")
    query(
        postgres_server.url(other),
        f"""
        CREATE FUNCTION public.eq(varchar, varchar) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN
            IF current_user = '{OWNER}' THEN CREATE TABLE public.ran (); END IF;
            RETURN $1::text = $2::text;
        END $$;
        CREATE OPERATOR public.= (LEFTARG = varchar, RIGHTARG = varchar, FUNCTION = public.eq)
        """,
    )
    make_backup(tmp_path / "b.tar", owner_url, database_url, "digits", {})
    with pytest.raises(StorageError, match="other users own objects in the search path of the tables"):
        restore_there(tmp_path / "b.tar", postgres_server, other, tmp_path / "home")
    assert query(target, "SELECT to_regclass('ran')") == [(None,)]


def test_only_rows_of_a_dump_of_mlflow_are_restored(
    empty_database_url: str, postgres_server: PostgresServer, other: str, tmp_path: Path
) -> None:
    """The tables are of an older MLflow."""
    name = "tab\t, back\\slash and \\."
    revision = "a5b4c3d2e1f0"
    create_mlflow_tables(empty_database_url, revision)
    query(
        empty_database_url,
        f"""
        CREATE FUNCTION run() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN CREATE TABLE ran (); RETURN NEW; END $$;
        INSERT INTO experiments (experiment_id, name) VALUES (7, '{name}');
        SELECT setval('experiments_experiment_id_seq', 9);
        INSERT INTO runs (run_uuid, experiment_id) VALUES ('r', 7);
        INSERT INTO metrics (key, run_uuid, timestamp, value, step, is_nan) VALUES ('a', 'r', 1, 0.5, 0, false);
        CREATE TRIGGER run BEFORE UPDATE ON runs FOR EACH ROW EXECUTE FUNCTION run();
        """,
    )
    with open_snapshot(empty_database_url, "the test") as snapshot, (tmp_path / "dump").open("wb") as dump:
        programs = snapshot.dump(dump)
    target = postgres_server.url(other, user=OWNER)
    left_out = restore_rows(
        tmp_path / "dump",
        (target, "the test"),
        create_tables=lambda: create_mlflow_tables(target, revision),
        must_be_empty=("runs",),
        programs=programs,
    )
    upgrade_mlflow(target)
    assert left_out == []
    assert query(target, "UPDATE runs SET name = 'x' RETURNING run_uuid, experiment_id") == [("r", 7)]
    assert query(target, "SELECT name FROM experiments") == [(name,)]
    assert query(target, "SELECT nextval('experiments_experiment_id_seq'), value FROM metrics") == [(10, 0.5)]
    assert query(target, "SELECT to_regclass('ran')") == [(None,)]
    assert query(target, "SELECT version_num FROM alembic_version") != [(revision,)]


RUN, OWN_MODEL = "0123456789abcdef" * 2, "m-" + "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("location", "restored"),
    [
        ("/home/victim", "mlflow-artifacts:/unknown"),
        ("file:///home/victim", "mlflow-artifacts:/unknown"),
        ("https://evil.example/7", "mlflow-artifacts:/7"),
        ("mlflow-artifacts://evil.example/7", "mlflow-artifacts:/7"),
        ("mlflow-artifacts:/7/../../x", "mlflow-artifacts:/unknown"),
        ("abfss://c@account.evil.example/x", "mlflow-artifacts:/unknown"),
        (f"/srv/mlflow/7/{RUN}/artifacts", f"mlflow-artifacts:/7/{RUN}/artifacts"),
        (f"/srv/mlflow/7/models/{OWN_MODEL}/artifacts/code", f"mlflow-artifacts:/7/models/{OWN_MODEL}/artifacts/code"),
        (f"/srv/7/{RUN}/artifacts/../../../x", "mlflow-artifacts:/unknown"),
        (f"mlflow-artifacts:/7/{RUN}/artifacts", f"mlflow-artifacts:/7/{RUN}/artifacts"),
        ("s3://bucket/7", "s3://bucket/7"),
        ("http://evil.example\\@unconfigured.invalid/7", "mlflow-artifacts:/7"),
        ("mlflow-artifacts://evil.example\\@unconfigured.invalid/7", "mlflow-artifacts:/7"),
        ("http://unconfigured.invalid/7", "mlflow-artifacts:/7"),
        ("mlflow-artifacts:/%2e%2e/%2e%2e/x", "mlflow-artifacts:/unknown"),
        ("http://[", "mlflow-artifacts:/unknown"),
        ("models://p@databricks/theirs/1", "mlflow-artifacts:/1"),
        ("runs:////p@databricks/x", "mlflow-artifacts:/unknown"),
    ],
)
def test_locations_of_artifacts_are_replaced(mlflow_cursor: Any, location: str, restored: str) -> None:
    """MLflow deletes and writes files at the locations in its database."""
    tables = ("experiments.artifact_location", "model_versions.storage_location")
    mlflow_cursor.execute(
        "INSERT INTO experiments (experiment_id, name, artifact_location) VALUES (7, 'e', %(l)s);"
        "INSERT INTO registered_models (name, workspace) VALUES ('m', 'default');"
        "INSERT INTO model_versions (name, version, source, storage_location, workspace)"
        " VALUES ('m', 1, 'models:/m-1', %(l)s, 'default');"
        "INSERT INTO webhooks (webhook_id, name, url, status, creation_timestamp, last_updated_timestamp)"
        " VALUES ('w', 'w', 'http://evil.example', 'ACTIVE', 0, 0)",
        {"l": location},
    )
    assert replace_artifact_locations(mlflow_cursor) == (0 if location == restored else len(tables))
    delete_acting_rows(mlflow_cursor)
    for table, _, column in (name.partition(".") for name in tables):
        mlflow_cursor.execute(f"SELECT {column} FROM {table}")
        assert mlflow_cursor.fetchall() == [(restored,)]
    mlflow_cursor.execute("SELECT source, (SELECT count(*) FROM webhooks) FROM model_versions")
    assert mlflow_cursor.fetchall() == [("models:/m-1", 0)]


def test_every_column_with_a_location_is_adapted(mlflow_cursor: Any) -> None:
    """A new version of MLflow may add one."""
    mlflow_cursor.execute(
        "SELECT table_name, column_name FROM information_schema.columns"
        " WHERE table_schema = current_schema() AND column_name ~ '(location|root|uri)$'"
    )
    adapted = {(table, column) for table, column, *_ in _LOCATIONS} | {("workspaces", "default_artifact_root")}
    assert set(mlflow_cursor.fetchall()) <= adapted


def test_new_experiments_do_not_get_a_location_of_the_backup(mlflow_cursor: Any) -> None:
    mlflow_cursor.execute("UPDATE workspaces SET default_artifact_root = 'file:///home/user'")
    assert mlflow_cursor.rowcount == 1
    delete_acting_rows(mlflow_cursor)
    mlflow_cursor.execute("SELECT default_artifact_root FROM workspaces")
    assert mlflow_cursor.fetchall() == [(None,)]


OTHER = "f" * 32


@pytest.mark.parametrize(
    ("run_id", "location", "restored"),
    [
        (RUN, f"mlflow-artifacts:/7/{RUN}/artifacts", f"7/{RUN}/artifacts"),
        (RUN, f"/srv/mlflow/7/{RUN}/artifacts", f"7/{RUN}/artifacts"),
        (RUN, "mlflow-artifacts:/7", f"unknown/{RUN}"),
        ("7", "mlflow-artifacts:/7", "unknown/7"),
        ("../7", "mlflow-artifacts:/../7", "unknown/7"),
        (RUN, f"mlflow-artifacts:/7/{OTHER}/artifacts", f"unknown/{RUN}"),
        (RUN, f"mlflow-artifacts:/7/{RUN}x/artifacts", f"unknown/{RUN}"),
        (RUN, "s3://bucket/7", f"unknown/{RUN}"),
        (RUN, f"/srv/7/{RUN}/artifacts/{'x' * 150}", f"unknown/{RUN}"),  # too long for the column with the prefix
    ],
)
def test_a_run_has_a_folder_of_its_own(mlflow_cursor: Any, run_id: str, location: str, restored: str) -> None:
    """`mlflow gc` deletes the folder of a deleted run."""
    mlflow_cursor.execute(
        "INSERT INTO experiments (experiment_id, name, artifact_location) VALUES (7, 'e', 'mlflow-artifacts:/7');"
        "INSERT INTO runs (run_uuid, experiment_id, artifact_uri) VALUES (%s, 7, %s), (%s, 7, %s);",
        (run_id, location, OTHER, other := f"mlflow-artifacts:/7/{OTHER}/artifacts"),
    )
    restored = f"mlflow-artifacts:/{restored}"
    assert replace_artifact_locations(mlflow_cursor) == (location != restored)
    mlflow_cursor.execute("SELECT artifact_uri FROM runs ORDER BY run_uuid = %s DESC", (run_id,))
    assert mlflow_cursor.fetchall() == [(restored,), (other,)]
