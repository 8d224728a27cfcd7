from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import optuna
import psycopg2
import pytest

from hpsearch.search.cli import run_command
from hpsearch.storage.database.connect import connect
from hpsearch.storage.database.migrate import migrate
from hpsearch.storage.database.roles import create_databases
from hpsearch.storage.embedded.data_directory import SUPERUSER
from hpsearch.storage.embedded.postgres import EmbeddedPostgres
from hpsearch.storage.embedded.postgres_account import make_postgres_folder
from hpsearch.storage.errors import StorageError
from hpsearch.storage.urls import build_url
from tests.faults.harness import Zygote

_PASSWORDS = {"owner_password": "o-secret", "worker_password": "w-secret", "mlflow_password": "m-secret"}
_CREATE = f"""
import sys, time
from pathlib import Path
from hpsearch.storage.database.roles import create_databases
print("ready", flush=True)
while not Path(sys.argv[2]).exists():
    time.sleep(0.001)
create_databases(sys.argv[1], **{_PASSWORDS!r})
"""


@pytest.fixture
def server(fresh_home: Path) -> Iterator[EmbeddedPostgres]:
    """Start a server without the roles of hpsearch, which logs every statement."""
    fresh_home.mkdir()
    fresh_home.chmod(0o755)
    (fresh_home / "logs").mkdir()
    log = fresh_home / "logs" / "postgres.log"
    server = EmbeddedPostgres(make_postgres_folder(fresh_home), log, has_port=True)
    port = server.start(None)
    _execute(_admin(server, port), "ALTER SYSTEM SET log_statement = 'all'", "SELECT pg_reload_conf()")
    yield server
    server.stop()


def _admin(server: EmbeddedPostgres, port: int | None = None) -> str:
    return build_url(
        user=SUPERUSER,
        password=server.password,
        host="127.0.0.1",
        port=port or server.read_port() or 0,
        database="postgres",
    )


def _execute(url: str, *statements: str) -> None:
    connection = connect(url, application_name="test")
    connection.autocommit = True
    try:
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
    finally:
        connection.close()


@pytest.mark.soak
def test_roles_are_created_by_four_concurrent_processes_and_again(
    server: EmbeddedPostgres, zygote: Zygote, tmp_path: Path
) -> None:
    admin = _admin(server)
    starters = [zygote.python(_CREATE, admin, tmp_path / "go") for _ in range(4)]
    for starter in starters:
        starter.lines(1)
    (tmp_path / "go").touch()
    said = [starter.communicate()[0] for starter in starters]
    assert [starter.returncode for starter in starters] == [0] * 4, said

    urls = create_databases(admin, **_PASSWORDS)
    migrate(urls.owner_url)
    _execute(urls.worker_url, "SELECT count(*) FROM trials")
    _execute(urls.mlflow_url, "CREATE TABLE runs (id int)")
    for url, database in ((urls.worker_url, "mlflow"), (urls.owner_url, "mlflow"), (urls.mlflow_url, "optuna")):
        with pytest.raises(StorageError, match="may not connect to database"):
            connect(url.rsplit("/", 1)[0] + f"/{database}", application_name="test")
    with pytest.raises(psycopg2.errors.InsufficientPrivilege):
        _execute(urls.worker_url, "CREATE TEMPORARY TABLE t (id int)")

    log = server.log.read_text()
    assert "ALTER ROLE" in log  # statements are logged,
    assert "-secret" not in log  # passwords are not


@pytest.mark.soak
def test_creating_roles_again_changes_passwords(server: EmbeddedPostgres) -> None:
    old = create_databases(_admin(server), **_PASSWORDS)
    new = create_databases(_admin(server), **_PASSWORDS | {"worker_password": "p@/:#?% '\""})
    _execute(new.worker_url, "SELECT 1")
    with pytest.raises(StorageError, match="rejected the password"):
        connect(old.worker_url, application_name="test")


@pytest.mark.soak
def test_a_worker_may_not_create_functions_in_a_server_that_was_upgraded_from_postgres_14(
    server: EmbeddedPostgres,
) -> None:
    admin = _admin(server)
    template = f"{admin.removesuffix('postgres')}template1"
    _execute(template, "GRANT CREATE ON SCHEMA public TO PUBLIC")
    urls = create_databases(admin, **_PASSWORDS)
    migrate(urls.owner_url)
    with pytest.raises(psycopg2.errors.InsufficientPrivilege, match="permission denied for schema public"):
        _execute(urls.worker_url, "CREATE FUNCTION public.f() RETURNS int LANGUAGE sql AS 'SELECT 1'")


def test_a_function_of_mlflows_role_does_not_run_as_the_superuser(server: EmbeddedPostgres) -> None:
    """It fits the types of the arguments better than the function of Postgres."""
    urls = create_databases(_admin(server), **_PASSWORDS)
    _execute(
        urls.mlflow_url,
        """
        CREATE FUNCTION public.has_schema_privilege(text, text, text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN
            CREATE ROLE planted SUPERUSER;
            RETURN true;
        END $$
        """,
    )
    create_databases(_admin(server), **_PASSWORDS)
    _execute(_admin(server), "CREATE ROLE planted")  # the function has not created it


@pytest.mark.soak
def test_an_admin_without_superuser_can_create_roles(server: EmbeddedPostgres) -> None:
    _execute(_admin(server), "CREATE ROLE boss LOGIN PASSWORD 'boss' CREATEROLE CREATEDB")
    boss = build_url(user="boss", password="boss", host="127.0.0.1", port=server.read_port() or 0, database="postgres")
    urls = create_databases(boss, **_PASSWORDS)
    create_databases(boss, **_PASSWORDS)
    migrate(urls.owner_url)
    _execute(urls.worker_url, "SELECT count(*) FROM trials")


@pytest.mark.soak
def test_an_admin_without_rights_is_an_error(server: EmbeddedPostgres) -> None:
    _execute(_admin(server), "CREATE ROLE clerk LOGIN PASSWORD 'clerk'")
    clerk = build_url(
        user="clerk", password="clerk", host="127.0.0.1", port=server.read_port() or 0, database="postgres"
    )
    with pytest.raises(StorageError, match=r"^HPSEARCH_ADMIN_URL: .* give the URL of a superuser") as raised:
        create_databases(clerk, **_PASSWORDS)
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)


ATTACKS = (
    "ALTER ROLE hpsearch_worker SET statement_timeout = 1",
    "ALTER ROLE hpsearch_worker SET default_transaction_read_only = on",
    "ALTER ROLE hpsearch_worker SET search_path = nowhere",
    "ALTER ROLE hpsearch_worker IN DATABASE optuna SET lock_timeout = 1",
    "ALTER ROLE hpsearch_worker PASSWORD 'stolen'",
)
COMMANDS = ("studies", "show s", "delete s --yes", "worker --study s")


def test_a_worker_can_harm_only_its_own_login(
    server: EmbeddedPostgres, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A login role can change itself, which Postgres cannot prevent; other logins are not affected."""
    admin = _admin(server)
    urls = create_databases(admin, **_PASSWORDS)
    migrate(urls.owner_url)
    _execute(admin, "CREATE ROLE ann LOGIN PASSWORD 'ann' IN ROLE hpsearch_access")
    ann = build_url(user="ann", password="ann", host="127.0.0.1", port=server.read_port() or 0, database="optuna")
    optuna.create_study(study_name="s", storage=ann)
    monkeypatch.setenv("HPSEARCH_HOME", str(tmp_path))
    for attack in ATTACKS:
        _execute(urls.worker_url, attack)
        capsys.readouterr()
        for command in COMMANDS:
            code = run_command([*command.split(), "--storage-url", urls.worker_url])
            error = capsys.readouterr().err
            assert code in ({0, 1, 2} if "timeout" in attack or "read_only" in attack else {1, 2}), (attack, command)
            assert "Traceback" not in error
            assert len(error.splitlines()) == (0 if code == 0 else 1), error
            assert "secret" not in error
        assert run_command(["studies", "--storage-url", ann]) == 0
        create_databases(admin, **_PASSWORDS)
        assert run_command(["studies", "--storage-url", urls.worker_url]) == 0
        assert "\ns " in capsys.readouterr().out
    for forbidden in (
        *(attack.replace("statement_timeout = 1", "statement_timeout = 2") for attack in ATTACKS),
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename IN ('hpsearch_owner', 'hpsearch_worker')",
        "SET ROLE hpsearch_worker",
        "CREATE TABLE mine (id int)",
        "ALTER TABLE trials DISABLE TRIGGER ALL",
        "UPDATE version_info SET schema_version = 99",
        "UPDATE alembic_version SET version_num = 'x'",
    ):
        with connect(urls.owner_url, application_name="victim"), pytest.raises(psycopg2.errors.InsufficientPrivilege):
            _execute(ann, forbidden)
    _execute(ann, "SET ROLE hpsearch_access; ALTER ROLE hpsearch_access SET statement_timeout = 1")
    assert run_command(["studies", "--storage-url", ann]) == 0, "the settings of a group do not affect its members"


@pytest.mark.parametrize(
    "setting", ["statement_timeout = 1", pytest.param("default_transaction_read_only = on", marks=pytest.mark.soak)]
)
def test_every_error_of_the_database_ends_a_command_with_one_line(
    server: EmbeddedPostgres, capsys: pytest.CaptureFixture[str], tmp_path: Path, setting: str
) -> None:
    urls = create_databases(_admin(server), **_PASSWORDS)
    migrate(urls.owner_url)
    where = ("--storage-url", urls.worker_url, "--home", str(tmp_path))
    _execute(urls.worker_url, f"ALTER ROLE hpsearch_worker SET {setting}")
    assert run_command(["studies", *where]) in {0, 1, 2}
    assert run_command(["run", "digits", "--tracking-uri", "http://127.0.0.1:1", "--workers", "0", *where]) in {1, 2}
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert re.search(r"^hpsearch: .*(read-only transaction|statement timeout)", error.splitlines()[-1])
