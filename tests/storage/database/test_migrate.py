from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import optuna
import psycopg2
import pytest
import sqlalchemy as sa
from optuna.storages import RDBStorage
from optuna.storages._rdb import models

from hpsearch.search.cli import run_command
from hpsearch.storage.database.connect import check_database
from hpsearch.storage.database.migrate import create_tables, migrate
from hpsearch.storage.database.roles import ACCESS, WORKER
from hpsearch.storage.database.schema import OPTUNA_REVISION, OPTUNA_TABLES, REVISION, REVISION_TABLES
from hpsearch.storage.errors import StorageError
from tests.conftest import PostgresServer, execute
from tests.faults.harness import Zygote
from tests.waiting import wait_for

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


# All test processes share the server and its roles.
TEAM = pytest.mark.xdist_group("team")


@pytest.fixture
def team(postgres_server: PostgresServer) -> Iterator[str]:
    """Return the owner's URL of another team's empty database, on the server where `hpsearch_worker` exists."""
    try:
        for role in ("team", "team_worker"):
            postgres_server.execute(f"CREATE ROLE {role} LOGIN PASSWORD '{role}'")
        postgres_server.execute("CREATE DATABASE team OWNER team")
        yield postgres_server.url("team", user="team")
    finally:
        postgres_server.execute("DROP DATABASE IF EXISTS team WITH (FORCE)")
        postgres_server.execute("DROP ROLE IF EXISTS team, team_worker")


@TEAM
def test_workers_of_another_team_have_no_access(
    postgres_server: PostgresServer, team: str, capsys: pytest.CaptureFixture[str]
) -> None:
    migrate(team)
    for statement in ("SELECT * FROM studies", "INSERT INTO studies (study_name) VALUES ('planted')"):
        with pytest.raises(psycopg2.errors.InsufficientPrivilege):
            execute(_worker_url(team), statement)
    assert run_command(["migrate", "--storage-url", team, "--worker-role", "team_worker"]) == 0
    assert "REVOKE CONNECT, TEMPORARY ON DATABASE team FROM PUBLIC" in capsys.readouterr().err
    execute(team, "REVOKE CONNECT, TEMPORARY ON DATABASE team FROM PUBLIC")
    # As a restore creates these tables again, with the default privileges.
    execute(team, *(f"GRANT INSERT, UPDATE ON {table} TO team_worker, PUBLIC" for table in REVISION_TABLES))
    assert migrate(team) == []
    worker = postgres_server.url("team", user="team_worker")
    check_database(worker)
    _use(worker)
    with pytest.raises(StorageError, match="may not connect"):
        check_database(_worker_url(team))
    for table in REVISION_TABLES:
        with pytest.raises(psycopg2.errors.InsufficientPrivilege):
            execute(worker, f"UPDATE {table} SET version_num = '0009'")
    assert run_command(["migrate", "--storage-url", team, "--worker-role", "ghost"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("hpsearch: --worker-role ghost: ")


@TEAM
def test_a_migration_revokes_the_access_of_another_team(team: str) -> None:
    create_tables(team, "0015")
    rows = "SELECT, INSERT, UPDATE, DELETE"
    for role in (WORKER, ACCESS):  # as earlier versions did
        execute(team, f"ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT {rows} ON TABLES TO {role}")
        execute(team, f"GRANT {rows} ON ALL TABLES IN SCHEMA public TO {role}")
        execute(team, f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {role}")
    _use(_worker_url(team))
    lost = [warning for warning in migrate(team) if "no longer has access" in warning]
    assert [role in warning for role, warning in zip((ACCESS, WORKER), lost, strict=True)] == [True, True]
    execute(team, "CREATE TABLE later (id int)")
    for table in ("studies", "later"):
        with pytest.raises(psycopg2.errors.InsufficientPrivilege):
            execute(_worker_url(team), f"SELECT * FROM {table}")
    migrate(team, worker_roles=[WORKER])
    assert not any("no longer has access" in warning for warning in migrate(team))
    check_database(_worker_url(team))


# As in every database of Postgres 14 or earlier.
_OPEN_SCHEMA = "GRANT CREATE ON SCHEMA public TO PUBLIC"
_PLANTED_FUNCTION = """
    CREATE FUNCTION public.eq(oid, regclass) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN
        IF current_user = 'team' THEN CREATE TABLE public.ran (); END IF;
        RETURN $1::int8 = $2::oid::int8;
    END $$
"""
_PLANTED_OPERATOR = "CREATE OPERATOR public.= (LEFTARG = oid, RIGHTARG = regclass, FUNCTION = public.eq)"


@TEAM
def test_an_operator_of_a_worker_does_not_run_as_the_owner(postgres_server: PostgresServer, team: str) -> None:
    admin = sa.make_url(postgres_server.admin_url).set(database="team").render_as_string(hide_password=False)
    worker = postgres_server.url("team", user="team_worker")
    insert = "INSERT INTO studies (study_name) VALUES ('{}')"
    create_tables(team, "0016")
    migrate(team, worker_roles=["team_worker"])
    execute(admin, _OPEN_SCHEMA)
    execute(worker, _PLANTED_FUNCTION, _PLANTED_OPERATOR)
    execute(worker, insert.format("first"))
    execute(team, "CREATE TABLE ran ()")  # the operator has not created it

    with pytest.raises(StorageError, match=r"operator public\.=\(oid,regclass\) of team_worker"):
        migrate(team)
    with pytest.raises(psycopg2.errors.InsufficientPrivilege, match="permission denied for schema public"):
        execute(worker, "CREATE TABLE public.more ()")
    execute(admin, "DROP OPERATOR public.= (oid, regclass)", "DROP FUNCTION public.eq", "CREATE TABLE odd ()")
    execute(admin, "ALTER TABLE odd OWNER TO team_worker")
    assert [warning for warning in migrate(team) if "table public.odd of team_worker" in warning]
    execute(worker, insert.format("second"))


def _plain(url: str) -> str:
    """Return a URL for psycopg2."""
    return url.replace("postgresql+psycopg2", "postgresql")


@TEAM
def test_a_migration_waits_for_operators_that_are_not_committed(postgres_server: PostgresServer, team: str) -> None:
    admin = sa.make_url(postgres_server.admin_url).set(database="team").render_as_string(hide_password=False)
    create_tables(team, "0016")
    execute(admin, _OPEN_SCHEMA)
    with closing(psycopg2.connect(_plain(postgres_server.url("team", user="team_worker")))) as worker:
        worker.cursor().execute(f"{_PLANTED_FUNCTION}; {_PLANTED_OPERATOR}")

        def commit_after_the_privilege_is_withdrawn() -> None:
            with closing(psycopg2.connect(_plain(admin))) as connection, connection.cursor() as cursor:
                connection.autocommit = True

                def is_withdrawn() -> bool:
                    cursor.execute("SELECT NOT has_schema_privilege('team_worker', 'public', 'CREATE')")
                    return bool(cursor.fetchone()[0])

                wait_for(is_withdrawn, "the end of the privilege")
            worker.commit()

        thread = threading.Thread(target=commit_after_the_privilege_is_withdrawn)
        thread.start()
        with pytest.raises(StorageError, match=r"operator public\.=\(oid,regclass\) of team_worker"):
            migrate(team)
        thread.join()
    execute(team, "CREATE TABLE ran ()")  # the operator has not created it


@TEAM
def test_an_open_transaction_of_another_user_is_an_error(
    postgres_server: PostgresServer, team: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpsearch.storage.database.migrate._TRANSACTION_SECONDS", 0.2)
    with closing(psycopg2.connect(_plain(postgres_server.url("team", user="team_worker")))) as worker:
        worker.cursor().execute("SELECT 1")
        with pytest.raises(StorageError, match=r"open for more than 0 s \(transaction \S+ of process \d+ of team_w"):
            migrate(team)
    migrate(team)


_PLANTED_TABLE = "CREATE TABLE public.version_info (schema_version int); GRANT ALL ON public.version_info TO team"
_PLANTED_TRIGGER = """
    CREATE FUNCTION pg_temp.run() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        CREATE TABLE public.ran (); RETURN NEW;
    END $$;
    CREATE TRIGGER t BEFORE INSERT ON public.version_info FOR EACH ROW EXECUTE FUNCTION pg_temp.run()
"""


@TEAM
@pytest.mark.parametrize(
    ("planted", "name"),
    [
        (_PLANTED_TABLE, "table public.version_info"),
        ("CREATE TYPE public.trialstate AS ENUM ('RUNNING')", "type public.trialstate"),
        ("CREATE DOMAIN public.trialstate AS text CHECK (VALUE <> '')", "type public.trialstate"),
        ("CREATE TYPE public.studydirection AS (x text)", "type public.studydirection"),
        ("CREATE TABLE public.studydirection (x text)", "table public.studydirection"),
    ],
)
def test_tables_and_types_of_others_that_hpsearch_would_use_are_an_error(
    postgres_server: PostgresServer, team: str, planted: str, name: str
) -> None:
    """Their owners can run code as the owner of the database by triggers and casts, whose functions are temporary."""
    admin = sa.make_url(postgres_server.admin_url).set(database="team").render_as_string(hide_password=False)
    execute(admin, _OPEN_SCHEMA)
    worker = psycopg2.connect(postgres_server.url("team", user="team_worker").replace("+psycopg2", ""))
    with worker, worker.cursor() as cursor:
        cursor.execute(planted)
        if planted == _PLANTED_TABLE:
            cursor.execute(_PLANTED_TRIGGER)
    with pytest.raises(StorageError, match=f"{name} of team_worker"):
        migrate(team)
    worker.close()
    execute(team, "CREATE TABLE ran ()")  # the trigger has not created it


_PLANTED_SCHEMA = (
    "CREATE SCHEMA team",
    "GRANT ALL ON SCHEMA team TO PUBLIC",
    """
    CREATE FUNCTION team.run() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN
        CREATE TABLE public.ran (); RETURN true;
    END $$
    """,
    "CREATE VIEW team.studies AS SELECT * FROM public.studies WHERE team.run()",
    "GRANT ALL ON ALL TABLES IN SCHEMA team TO PUBLIC",
)


@TEAM
def test_a_schema_with_the_name_of_the_owner_is_not_searched(postgres_server: PostgresServer, team: str) -> None:
    admin = sa.make_url(postgres_server.admin_url).set(database="team").render_as_string(hide_password=False)
    execute(admin, "GRANT ALL ON DATABASE team TO team_worker")
    (warning,) = [warning for warning in migrate(team, worker_roles=["team_worker"]) if "create schemas" in warning]
    execute(postgres_server.url("team", user="team_worker"), *_PLANTED_SCHEMA)
    assert run_command(["studies", "--storage-url", team]) == 0
    execute(team, warning.partition("owner: ")[2])
    assert not any("create schemas" in warning for warning in migrate(team))
    execute(team, "CREATE TABLE ran ()")  # the function has not created it


@TEAM
def test_a_schema_of_another_user_with_the_name_of_the_owner_is_an_error(
    postgres_server: PostgresServer, team: str
) -> None:
    admin = sa.make_url(postgres_server.admin_url).set(database="team").render_as_string(hide_password=False)
    execute(admin, "CREATE SCHEMA team AUTHORIZATION team_worker", "GRANT ALL ON SCHEMA team TO team")
    with pytest.raises(StorageError, match="schema team of team_worker"):
        migrate(team)


@TEAM
def test_functions_that_a_worker_has_added_to_an_extension_are_an_error(
    postgres_server: PostgresServer, team: str
) -> None:
    admin = sa.make_url(postgres_server.admin_url).set(database="team").render_as_string(hide_password=False)
    execute(admin, _OPEN_SCHEMA, "GRANT CREATE ON DATABASE team TO team_worker")
    extend = "ALTER EXTENSION hstore ADD FUNCTION public.eq(oid, regclass)"
    execute(postgres_server.url("team", user="team_worker"), "CREATE EXTENSION hstore", _PLANTED_FUNCTION, extend)
    with pytest.raises(StorageError, match=r"function .*eq\(oid,regclass\) of team_worker"):
        migrate(team)


def _run_remedy(admin: str, error: StorageError) -> None:
    execute(admin, str(error).partition("superuser: ")[2].partition("; or keep")[0])


@TEAM
def test_a_schema_of_the_superuser_needs_the_superuser(postgres_server: PostgresServer, team: str) -> None:
    """As in every database of Postgres 14 or earlier, where the owner of a database does not own its schema."""
    admin = sa.make_url(postgres_server.admin_url).set(database="team").render_as_string(hide_password=False)
    execute(admin, _OPEN_SCHEMA, "ALTER SCHEMA public OWNER TO postgres", "REVOKE ALL ON SCHEMA public FROM team")
    with pytest.raises(StorageError, match="all users may create functions in the schema public") as raised:
        migrate(team, worker_roles=["team_worker"])  # a worker could create one between the check and a statement
    _run_remedy(admin, raised.value)
    migrate(team, worker_roles=["team_worker"])
    _use(postgres_server.url("team", user="team_worker"))


@TEAM
def test_functions_of_a_worker_that_has_the_owner_as_member_are_an_error(
    postgres_server: PostgresServer, team: str
) -> None:
    """Up to Postgres 14, each role that can log in may make others its members."""
    admin = sa.make_url(postgres_server.admin_url).set(database="team").render_as_string(hide_password=False)
    execute(admin, _OPEN_SCHEMA, "GRANT team_worker TO team")
    execute(postgres_server.url("team", user="team_worker"), _PLANTED_FUNCTION)
    with pytest.raises(StorageError, match=r"function .*eq\(oid,regclass\) of team_worker"):
        migrate(team)


@TEAM
def test_the_owner_of_the_tables_keeps_its_privilege_in_a_database_of_the_superuser(
    postgres_server: PostgresServer, team: str
) -> None:
    admin = sa.make_url(postgres_server.admin_url).set(database="team").render_as_string(hide_password=False)
    migrate(team)
    execute(admin, _OPEN_SCHEMA, "ALTER SCHEMA public OWNER TO postgres", "ALTER DATABASE team OWNER TO postgres")
    execute(admin, "REVOKE ALL ON SCHEMA public FROM team", "GRANT CREATE ON SCHEMA public TO team_worker")
    for who in ("all users", "the role team_worker"):
        with pytest.raises(StorageError, match="may create functions in the schema public") as raised:
            migrate(team)
        assert who in str(raised.value)
        _run_remedy(admin, raised.value)
    migrate(team)
    execute(team, "CREATE TABLE public.later ()")


@TEAM
def test_a_table_of_a_worker_in_a_schema_with_an_odd_name_is_an_error(
    postgres_server: PostgresServer, team: str
) -> None:
    admin = sa.make_url(postgres_server.admin_url).set(database="team").render_as_string(hide_password=False)
    execute(team, 'CREATE SCHEMA "team a.b"', 'ALTER ROLE team SET search_path = "team a.b"')
    execute(admin, 'CREATE TABLE "team a.b".alembic_version ()')
    execute(admin, 'ALTER TABLE "team a.b".alembic_version OWNER TO team_worker')
    with pytest.raises(StorageError, match=r'table "team a\.b"\.alembic_version of team_worker'):
        migrate(team)


@TEAM
def test_workers_cannot_change_the_revision_of_tables_that_are_created_for_a_restore(
    postgres_server: PostgresServer, team: str
) -> None:
    """They have access to new tables by the default privileges that an earlier migration has set."""
    worker = postgres_server.url("team", user="team_worker")
    migrate(team, worker_roles=["team_worker"])
    execute(team, "DROP SCHEMA public CASCADE", "CREATE SCHEMA public", "GRANT USAGE ON SCHEMA public TO team_worker")
    execute(team, "ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT ALL ON TABLES TO team_worker")
    create_tables(team, "0016")
    for table in REVISION_TABLES:
        with pytest.raises(psycopg2.errors.InsufficientPrivilege):
            execute(worker, f"UPDATE {table} SET version_num = version_num")


@TEAM
def test_a_database_that_cannot_store_all_characters_is_an_error(
    postgres_server: PostgresServer, team: str, capsys: pytest.CaptureFixture[str]
) -> None:
    admin = postgres_server.admin_url
    execute(admin, "CREATE DATABASE latin OWNER team ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    try:
        url = sa.make_url(team).set(database="latin").render_as_string(hide_password=False)
        with pytest.raises(StorageError, match="the database has the encoding LATIN1; create one with: ENCODING"):
            migrate(url)
        create_tables(url, REVISION)
        migrate(url)  # tables of earlier versions still work
        run_command(["doctor", "--storage-url", url])
        assert "the database has the encoding LATIN1" in capsys.readouterr().out
    finally:
        execute(admin, "DROP DATABASE latin WITH (FORCE)")


@TEAM
def test_the_tables_may_be_in_another_schema(postgres_server: PostgresServer, team: str) -> None:
    schema = "a \"b' c"
    quoted = '"a ""b\' c"'
    execute(team, f"CREATE SCHEMA {quoted}", f"ALTER ROLE team SET search_path = {quoted}")
    migrate(team, worker_roles=["team_worker"])
    execute(team, "INSERT INTO studies (study_name) VALUES ('s')")
    check_database(team)
    engine = sa.create_engine(team)
    assert "hpsearch_study_ids" in sa.inspect(engine).get_table_names(schema)
    worker = postgres_server.url("team", user="team_worker")
    execute(worker, f"INSERT INTO {quoted}.studies (study_name) VALUES ('w')")
    execute(worker, f"ALTER ROLE team_worker SET search_path = {quoted}")
    assert run_command(["studies", "--storage-url", worker]) == 0
    engine.dispose()
