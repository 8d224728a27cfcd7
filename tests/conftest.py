"""Real services for every test: a Postgres with one database per test, and one full stack for the whole run."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg2
import pytest
from psycopg2 import sql

from storage.database.migrate import migrate
from storage.database.roles import OWNER, WORKER, Databases, create_databases
from storage.embedded import stack as embedded
from storage.embedded.postgres_account import make_folder
from storage.embedded.postgres_data import SUPERUSER
from storage.embedded.postgres_server import Server
from storage.urls import build

# pytest's main process loads readline, which tells all processes that it starts how wide its terminal is.
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)

# Stops the services of a home folder and removes it when its input closes: at the end of the tests, or when they were
# killed, for the services would outlive them.
_GUARD = """
import shutil, sys
from pathlib import Path
sys.stdin.read()
from storage.embedded.stack import down
home = Path(sys.argv[1])
down(home)
shutil.rmtree(home.parent, ignore_errors=True)
"""


@contextmanager
def guarded_home() -> Iterator[Path]:
    """Yield a path for a home folder, whose services are stopped however the tests end."""
    parent = Path(tempfile.mkdtemp(prefix="hpsearch-test-")).resolve()
    parent.chmod(0o755)  # as root, Postgres runs as another user, who has to get in
    home = parent / "home"
    guard = subprocess.Popen([sys.executable, "-c", _GUARD, home], stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield home
    finally:
        guard.communicate()
    assert guard.returncode == 0


@pytest.fixture(scope="session", autouse=True)
def _no_settings_of_the_user() -> Iterator[None]:
    """Keep the tests away from the services, the studies and the data of whoever runs them."""
    with pytest.MonkeyPatch.context() as patch, guarded_home() as home:
        for name in list(os.environ):
            if name.startswith(("HPSEARCH_", "MLFLOW_", "PG")):
                patch.delenv(name)
        patch.setenv("HPSEARCH_HOME", str(home))
        yield


@pytest.fixture(scope="session")
def stack(_no_settings_of_the_user: None) -> Iterator[embedded.StackInfo]:
    """The whole embedded stack, shared by all tests: leave no study behind that another test could trip over."""
    with guarded_home() as home:
        yield embedded.up(home)


@dataclass
class PostgresServer:
    """An embedded Postgres with the roles of a deployment, and `template`: a migrated database to copy."""

    port: int
    admin_url: str
    databases: Databases
    template: str = "hpsearch_template"

    def url(self, database: str, *, user: str = WORKER, password: str | None = None) -> str:
        """Return the URL of a database for one of the roles (whose passwords are their names) or another user."""
        return build(
            user=user,
            password=password or user,
            host="127.0.0.1",
            port=self.port,
            database=database,
            query="sslmode=disable",
        )

    def execute(self, statement: str, *names: str) -> None:
        """Run a statement as superuser, outside of a transaction, with `{}` replaced by quoted names."""
        connection = psycopg2.connect(self.admin_url.replace("+psycopg2", ""))
        connection.autocommit = True
        try:
            with connection.cursor() as cursor:
                cursor.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))
        finally:
            connection.close()


@pytest.fixture(scope="session")
def postgres_server(_no_settings_of_the_user: None) -> Iterator[PostgresServer]:
    """A Postgres without the rest of the stack: it is there in two seconds."""
    with guarded_home() as home:
        (home / "logs").mkdir(parents=True)
        home.chmod(0o755)
        embedded_server = Server(make_folder(home), home / "logs" / "postgres.log")
        port = embedded_server.start(None)
        admin = build(
            user=SUPERUSER, password=embedded_server.password, host="127.0.0.1", port=port, database="postgres"
        )
        admin += "?sslmode=disable"
        databases = create_databases(admin, owner_password=OWNER, worker_password=WORKER, mlflow_password="mlflow")
        server = PostgresServer(port, admin, databases)
        server.execute("CREATE DATABASE {} OWNER {}", server.template, OWNER)
        migrate(server.url(server.template, user=OWNER))
        yield server


@pytest.fixture(scope="session")
def guarded_homes(_no_settings_of_the_user: None) -> Callable[[], AbstractContextManager[Path]]:
    """Makes home folders whose services are stopped however the tests end, for fixtures of a wider scope."""
    return guarded_home


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """An empty folder that every user can enter, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory(prefix="hpsearch-test-") as folder:
        path = Path(folder).resolve()
        path.chmod(0o755)
        yield path


@pytest.fixture
def fresh_home(_no_settings_of_the_user: None) -> Iterator[Path]:
    """The path of a home folder of the test's own, not made yet; what is started there is stopped in the end."""
    with guarded_home() as home:
        yield home


_numbers = itertools.count()


def _database(server: PostgresServer, *, template: str) -> Iterator[str]:
    name = f"test_{os.getpid()}_{next(_numbers)}"
    server.execute("CREATE DATABASE {} OWNER {} TEMPLATE {}", name, OWNER, template)
    yield name
    server.execute("DROP DATABASE {} WITH (FORCE)", name)


@pytest.fixture
def database(postgres_server: PostgresServer) -> Iterator[str]:
    """The name of a fresh, migrated database on `postgres_server`."""
    yield from _database(postgres_server, template=postgres_server.template)


@pytest.fixture
def database_url(postgres_server: PostgresServer, database: str) -> str:
    """URL of a fresh, migrated database for a worker: rows only, no change of the schema."""
    return postgres_server.url(database)


@pytest.fixture
def owner_url(postgres_server: PostgresServer, database: str) -> str:
    """URL of the same database as `database_url`, for its owner."""
    return postgres_server.url(database, user=OWNER)


@pytest.fixture
def empty_database_url(postgres_server: PostgresServer) -> Iterator[str]:
    """URL of a fresh database without tables, for its owner."""
    for name in _database(postgres_server, template="template0"):
        yield postgres_server.url(name, user=OWNER)
