from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from hpsearch.storage.backup.dumps import _make_connection_arguments
from hpsearch.storage.database.connect import check_database, find_database_error, make_engine, open_cursor
from hpsearch.storage.database.migrate import migrate
from hpsearch.storage.database.roles import OWNER, WORKER
from hpsearch.storage.embedded.postgres import EmbeddedPostgres, make_database_url
from hpsearch.storage.embedded.postgres_account import make_postgres_folder
from hpsearch.storage.embedded.stack import StackInfo
from hpsearch.storage.errors import ServiceUnavailableError, StorageError
from hpsearch.storage.sockets import LOOPBACK, find_server_users
from tests.conftest import execute


def _refused(url: str, *, away: bool = False) -> str:
    with pytest.raises(StorageError) as raised:
        check_database(url, retry_seconds=0.0)
    assert isinstance(raised.value, ServiceUnavailableError) == away
    message = str(raised.value)
    assert message.startswith("--storage-url ")
    assert "\n" not in message
    password = sa.make_url(url).password
    assert not password or f":{password}@" not in message
    return message


def test_worker_and_owner_can_use_a_migrated_database(database_url: str, owner_url: str) -> None:
    check_database(database_url)
    check_database(owner_url)


def test_an_engine_survives_the_loss_of_its_connections(database_url: str, postgres_server: Any) -> None:
    engine = make_engine(database_url, application_name="hpsearch worker 7")
    ask = sa.text("SELECT application_name, pid FROM pg_stat_activity WHERE pid = pg_backend_pid()")
    try:
        with engine.connect() as connection:
            name, pid = connection.execute(ask).one()
        assert name == "hpsearch worker 7"
        postgres_server.execute(f"SELECT pg_terminate_backend({pid}, 10000)")
        with engine.connect() as connection:
            assert connection.execute(ask).one()[1] != pid
    finally:
        engine.dispose()


_VARIABLES = {
    "PGCHANNELBINDING": "require",
    "PGCLIENTENCODING": "nosuch",
    "PGDATESTYLE": "nosuch",
    "PGGSSENCMODE": "require",
    "PGHOSTADDR": "10.255.255.1",
    "PGOPTIONS": "-c search_path=nosuch",
    "PGREQUIREAUTH": "none",
    "PGSERVICE": "nosuch",
    "PGSSLMODE": "verify-full",
    "PGTARGETSESSIONATTRS": "read-only",
    "PGTZ": "Mars",
}


def _find_uid(port: int) -> int:
    """Return the id of the user that runs the server, which is another one if the tests run as root."""
    (uid,) = find_server_users(port) or {os.geteuid()}
    return uid


def test_variables_of_libpq_have_no_effect_on_the_embedded_server(
    postgres_server: Any, empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = str(sa.make_url(empty_database_url).database)
    url = make_database_url(OWNER, OWNER, LOOPBACK, postgres_server.port, database, uid=_find_uid(postgres_server.port))
    for name, value in _VARIABLES.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert find_database_error(url) is None, name
    for name, value in _VARIABLES.items():
        monkeypatch.setenv(name, value)
    migrate(url)
    check_database(url)
    assert not any(name in _make_connection_arguments(url)[1] for name in _VARIABLES)
    assert all(os.environ[name] == value for name, value in _VARIABLES.items())  # for the code of objectives
    assert "PGTZ" in _make_connection_arguments(empty_database_url)[1]
    assert find_database_error(empty_database_url) is not None  # they stay in force for the user's own URLs


def test_a_kerberos_cache_that_is_a_pipe_does_not_hang_the_embedded_server(
    postgres_server: Any, empty_database_url: str, tmp_path: Path
) -> None:
    """libpq looks for tickets in a file of /tmp, which another user may have created."""
    database = str(sa.make_url(empty_database_url).database)
    url = make_database_url(OWNER, OWNER, LOOPBACK, postgres_server.port, database, uid=_find_uid(postgres_server.port))
    os.mkfifo(tmp_path / "tickets")
    code = (
        "import sys; from hpsearch.storage.database.connect import find_database_error as e; sys.exit(e(sys.argv[1]))"
    )
    environment = {**os.environ, "KRB5CCNAME": f"FILE:{tmp_path / 'tickets'}"}
    subprocess.run([sys.executable, "-c", code, url], env=environment, timeout=60, check=True)


def test_both_ends_detect_a_lost_peer(database_url: str) -> None:
    engine = make_engine(database_url, application_name="test")
    try:
        with engine.connect() as connection:
            show = {
                name: connection.exec_driver_sql(f"SHOW {name}").scalar()
                for name in ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count")
            }
            raw: Any = connection.connection.dbapi_connection
            client = raw.info.dsn_parameters
            assert raw.info.socket > 0
    finally:
        engine.dispose()
    assert list(show.values()) == ["20", "5", "3"]
    assert (client["keepalives"], client["keepalives_idle"], client["tcp_user_timeout"]) == ("1", "20", "35000")


def test_settings_of_the_url_are_kept(database_url: str) -> None:
    engine = make_engine(database_url + "&application_name=mine&connect_timeout=3", application_name="ours")
    try:
        with engine.connect() as connection:
            assert connection.exec_driver_sql("SHOW application_name").scalar() == "mine"
            raw: Any = connection.connection.dbapi_connection
            assert raw.info.dsn_parameters["connect_timeout"] == "3"
    finally:
        engine.dispose()


def test_a_wrong_password_database_user_or_host_is_an_error(postgres_server: Any, database: str) -> None:
    url = postgres_server.url
    assert f"rejected the password of user '{WORKER}'" in _refused(url(database, password="wrong"))
    assert "there is no database 'nowhere'" in _refused(url("nowhere"))
    assert "rejected the password of user 'stranger'" in _refused(url(database, user="stranger"))
    assert "'nohost.invalid' cannot be resolved" in _refused(url(database).replace("127.0.0.1", "nohost.invalid"))
    assert f"may not connect to database 'mlflow'; GRANT CONNECT ON DATABASE mlflow TO {WORKER}" in _refused(
        url("mlflow")
    )


def test_spaces_in_the_options_of_a_url_reach_the_server(database_url: str) -> None:
    url = f"{database_url}&options=-c%20statement_timeout%3D12345ms"
    with open_cursor(url, application_name="test") as cursor:
        cursor.execute("SHOW statement_timeout")
        assert cursor.fetchone() == ("12345ms",)


def test_a_closed_port_is_an_error() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, but not listening
        port = closed.getsockname()[1]
        assert f"nothing listens at 127.0.0.1:{port}" in _refused(f"postgresql://u:p@127.0.0.1:{port}/db", away=True)
        url = f"postgresql://u:p@/db?host=127.0.0.1&port={port}"
        assert f"nothing listens at 127.0.0.1:{port}" in _refused(url, away=True)


@pytest.mark.slow
def test_a_server_that_never_replies_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        url = f"postgresql://u:p@127.0.0.1:{port}/db?connect_timeout=2"
        assert f"127.0.0.1:{port} does not answer in time" in _refused(url, away=True)


@pytest.mark.parametrize("ssl", ["disable", "prefer", "require"])
def test_the_url_of_the_tracking_server_is_an_error(stack: StackInfo, ssl: str) -> None:
    where = stack.tracking_uri.removeprefix("http://")
    message = _refused(f"postgresql://u:p@{where}/db?sslmode={ssl}", away=True)
    assert f"the server at {where} is not Postgres" in message


def test_forked_processes_use_connections_of_their_own(database_url: str) -> None:
    """On common connections, a process would read the results of another one."""
    engine = make_engine(database_url, application_name="test")
    query = sa.text("SELECT pg_backend_pid()")
    with engine.connect() as connection:
        own = connection.execute(query).scalar_one()
    reader, writer = os.pipe()
    for _ in range(3):
        if (child := os.fork()) == 0:
            with engine.connect() as connection:
                os.write(writer, f"{connection.execute(query).scalar_one()} ".encode())
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    os.close(writer)
    others = os.read(reader, 1000).split()
    os.close(reader)
    assert len({own, *map(int, others)}) == 4
    with engine.connect() as connection:
        assert connection.execute(query).scalar_one() == own


@pytest.mark.parametrize("database", ["postgres", "template1"])
def test_a_worker_cannot_connect_to_other_databases_of_the_embedded_server(stack: StackInfo, database: str) -> None:
    url = sa.make_url(stack.storage_url).set(database=database)
    assert f"may not connect to database '{database}'" in _refused(url.render_as_string(hide_password=False))


def test_too_many_connections_are_an_error(postgres_server: Any, database: str) -> None:
    postgres_server.execute("CREATE ROLE crowded LOGIN PASSWORD 'crowded' CONNECTION LIMIT 0")
    try:
        assert "has no free connection" in _refused(postgres_server.url(database, user="crowded"), away=True)
    finally:
        postgres_server.execute("DROP ROLE crowded")


def test_missing_tables_are_an_error(empty_database_url: str, owner_url: str) -> None:
    assert "the tables do not exist; run hpsearch migrate" in _refused(empty_database_url)
    _execute(owner_url, "DROP TABLE trial_heartbeats")
    assert "tables are missing (trial_heartbeats)" in _refused(owner_url)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE alembic_version SET version_num = 'v2.6.0.a'",
        "DELETE FROM alembic_version",
        "DROP TABLE alembic_version",
    ],
)
def test_tables_of_another_optuna_version_are_an_error(database_url: str, owner_url: str, statement: str) -> None:
    _execute(owner_url, statement)
    message = _refused(database_url)
    assert "another version of Optuna" in message
    assert "run hpsearch migrate" in message


def test_missing_rights_are_an_error(database_url: str, owner_url: str) -> None:
    _execute(owner_url, f"REVOKE INSERT, DELETE ON trials, trial_values FROM {WORKER}")
    message = _refused(database_url)
    assert (
        f"user '{WORKER}' lacks DELETE, INSERT on trials, trial_values; run hpsearch migrate --worker-role" in message
    )


def test_a_schema_without_usage_right_is_an_error(database_url: str, owner_url: str) -> None:
    _execute(owner_url, f"REVOKE USAGE ON SCHEMA public FROM PUBLIC, {WORKER}")
    assert f"GRANT USAGE ON SCHEMA public TO {WORKER}" in _refused(database_url)


@pytest.mark.soak
def test_a_read_only_replica_is_an_error(fresh_home: Path) -> None:
    fresh_home.mkdir()
    fresh_home.chmod(0o755)
    (fresh_home / "logs").mkdir()
    server = EmbeddedPostgres(make_postgres_folder(fresh_home), fresh_home / "logs" / "postgres.log")
    server.start(None)
    server.stop()
    (server.data_folder / "standby.signal").touch(0o644)
    port = server.start(None)
    assert "read-only replica" in _refused(server.make_url(port))


def _execute(url: str, statement: str) -> None:
    engine = sa.create_engine(url)
    try:
        with engine.begin() as connection:
            connection.exec_driver_sql(statement)
    finally:
        engine.dispose()


def test_only_the_owner_changes_the_schema(database_url: str, owner_url: str) -> None:
    assert sa.make_url(owner_url).username == OWNER
    with pytest.raises(sa.exc.ProgrammingError, match="permission denied for schema public"):
        _execute(database_url, "CREATE TABLE mine (x int)")
    with pytest.raises(sa.exc.ProgrammingError, match="must be owner"):
        _execute(database_url, "DROP TABLE trials")
    _execute(owner_url, "CREATE TABLE mine (x serial)")
    _execute(
        database_url, "INSERT INTO mine DEFAULT VALUES"
    )  # later tables and their sequences get rights by default privileges


def test_the_isolation_level_does_not_depend_on_the_server(owner_url: str, database_url: str) -> None:
    """With `repeatable read`, a claim that waited for another one would not see the new trial."""
    name = sa.make_url(database_url).database
    execute(owner_url, f'ALTER DATABASE "{name}" SET default_transaction_isolation = "repeatable read"')
    engine = make_engine(database_url, application_name="test")
    try:
        with engine.connect() as connection:
            assert connection.execute(sa.text("SHOW transaction_isolation")).scalar_one() == "read committed"
    finally:
        engine.dispose()
        execute(owner_url, f'ALTER DATABASE "{name}" RESET default_transaction_isolation')
