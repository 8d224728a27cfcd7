"""Real services for the tests: a Postgres with one database per test, and one full stack for the whole run.

`--quick` deselects tests that need a process, a stack or a whole search. `--soak` adds tests that repeat and enlarge
other tests, or that need a whole deployment.
"""

from __future__ import annotations

import gc
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg2
import pytest
import sqlalchemy as sa
from filelock import FileLock
from hypothesis import settings
from psycopg2 import sql

from hpsearch.search.services import DASHBOARD_COMMAND
from hpsearch.storage.database.migrate import migrate
from hpsearch.storage.database.roles import OWNER, WORKER, Databases, create_databases
from hpsearch.storage.embedded import stack as embedded
from hpsearch.storage.embedded.data_directory import SUPERUSER
from hpsearch.storage.embedded.postgres import EmbeddedPostgres
from hpsearch.storage.embedded.postgres_account import find_postgres_folder, make_postgres_folder
from hpsearch.storage.urls import build_url
from tests.database_pool import Pool
from tests.faults.harness import Zygote, server_in, zygotes

gc.disable()  # until the tests are collected: their imports take a quarter less time

# pytest's main process loads readline, which sets these variables to the width of its terminal for all child processes.
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)

# MLflow tries to import these in every other call, which searches all folders of sys.path.
sys.modules |= {name: None for name in ("dbruntime", "pyspark", "IPython") if find_spec(name) is None}  # type: ignore[misc]

# Threads that share a core with those of the other process of pytest-xdist spin while they wait for each other, and so
# take half as much again for the same work. The zygote has one thread too; a fleet divides the cores itself.
os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")

# One cache for all tests: each has its own home.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "compiled"))

# Most tests expect the results of a CPU. `CUDA_VISIBLE_DEVICES=0 ./hpsearch test` uses a GPU.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

# A suite in the background of a script, or under nohup, is started with signals ignored, and what it starts would be
# too. The suite ignores them with a handler function instead, so that children start with the default actions.
for _number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it were ignored, the exit codes of child processes would be lost
signal.pthread_sigmask(signal.SIG_SETMASK, [])

# Stops the services of home folders and removes the parent folder when its input closes: at the end of the tests, or
# when the tests are killed. Otherwise the services would outlive them.
_GUARD = """
import shutil, sys
from pathlib import Path
sys.stdin.read()
from hpsearch.storage.embedded.stack import down
homes = [Path(home) for home in sys.argv[1:]]
for home in homes:
    down(home)
shutil.rmtree(homes[0].parent, ignore_errors=True)
"""


# Home folders are in memory where it is large enough. Databases consist of hundreds of files, and ext4 searches for a
# free inode among all that were deleted in the last minutes, which took half of the CPU time of the tests.
_MEMORY = Path("/dev/shm")
_is_large = _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > 4 * 2**30
_PARENT = _MEMORY if _is_large else None


@contextmanager
def guarded_home() -> Iterator[Path]:
    """Yield a path for a home folder. Its services are stopped even if the tests are killed."""
    with guarded_folder("home") as folder:
        yield folder / "home"


@contextmanager
def guarded_folder(*homes: str) -> Iterator[Path]:
    """Yield a folder with these home folders. At the end their services are stopped and the folder is removed."""
    folder = Path(tempfile.mkdtemp(prefix="hpsearch-test-", dir=_PARENT)).resolve()
    folder.chmod(0o755)  # for root, Postgres runs as another user, which needs access
    command = [sys.executable, "-c", _GUARD, *(folder / home for home in homes)]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield folder
    finally:
        guard.communicate()
    assert guard.returncode == 0


# The folder of the services that all processes of a run share. The first process that needs a service starts it.
_SHARED = pytest.StashKey[Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options for quick runs and for CI."""
    parser.addoption("--quick", action="store_true", help="only tests of a moment: no stack, no search, no processes")
    parser.addoption("--soak", action="store_true", help="the soaks too: repetitions, whole deployments")
    parser.addoption(
        "--long", action="store_true", help="the tests too that wait for many timeouts, for an hour in all"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Set the number of hypothesis examples, and keep the shared services until the end of the run."""
    settings.register_profile("hpsearch", deadline=None, max_examples=600 if config.getoption("--soak") else 100)
    settings.load_profile("hpsearch")
    if given := getattr(config, "workerinput", {}).get("shared"):
        config.stash[_SHARED] = Path(given)
        return
    shared = ExitStack()
    config.add_cleanup(shared.close)
    parent = shared.enter_context(guarded_folder("stack", "postgres"))
    shared.enter_context(zygotes(parent / "zygote"))
    config.stash[_SHARED] = parent


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Send a pytest-xdist process the folder of the shared services."""
    node.workerinput["shared"] = str(node.config.stash[_SHARED])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests by the options, and run tests last that need a stack which other tests start."""
    items.sort(key=lambda item: "own_stack" in getattr(item, "fixturenames", ()))
    left_out = [item for item in items if not _is_wanted(config, item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Make tests faster by the loggers and the objects that exist now, which are as old as the process."""
    gc.freeze()
    gc.enable()
    # Pytest adds its handlers to each logger that does not propagate, three times per test; torch has dozens of them.
    for name, logger in logging.getLogger().manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True


def _is_wanted(config: pytest.Config, item: pytest.Item) -> bool:
    if any(item.get_closest_marker(name) and not config.getoption(f"--{name}") for name in ("soak", "long")):
        return False
    return not config.getoption("--quick") or _is_quick(item)


def _is_quick(item: pytest.Item) -> bool:
    return not _SLOW.intersection(getattr(item, "fixturenames", ())) and not any(
        item.get_closest_marker(name) for name in ("slow", "e2e", "faults")
    )


_SLOW = {"stack", "own_home", "guarded_homes", "zygote", "fresh_home", "postgres_server"}


@pytest.fixture(scope="session", autouse=True)
def _no_settings_of_the_user() -> Iterator[None]:
    """Keep the tests away from the services, the studies and the data of the user."""
    with pytest.MonkeyPatch.context() as patch, guarded_home() as home:
        for name in list(os.environ):
            if name.startswith(("HPSEARCH_", "MLFLOW_", "PG", "WANDB_")):
                patch.delenv(name)
        patch.setenv("HPSEARCH_HOME", str(home))
        yield


@pytest.fixture(scope="session")
def stack(_no_settings_of_the_user: None, pytestconfig: pytest.Config) -> embedded.StackInfo:
    """Start the whole embedded stack, which all tests share. A test must use its own study names."""
    home = pytestconfig.stash[_SHARED] / "stack"
    with FileLock(home.with_suffix(".lock")):
        first = not home.exists()
        made = embedded.up(home, dashboard=DASHBOARD_COMMAND)
        if first:
            folder = find_postgres_folder(home)
            assert folder is not None
            server = EmbeddedPostgres(folder, home / "logs" / "postgres.log")
            forget_power_cuts(server.make_url(server.read_port() or 0))
        return made


@pytest.fixture(scope="session")
def own_home(_no_settings_of_the_user: None) -> Iterator[Path]:
    """Return the home of another stack for tests that break it. They run one after another in one pytest-xdist group.

    Its path is long, and has spaces and characters with a meaning in URLs. Each test gets the stack in the state that
    the previous test left.
    """
    with guarded_home() as fresh:
        home = fresh / ("a long path " * 10 + "#1%20?'\"$x") / "home"
        home.parent.mkdir(parents=True)
        for folder in (fresh, *fresh.rglob("*")):
            folder.chmod(0o755)
        yield home
        embedded.down(home)


@pytest.fixture
def own_stack(own_home: Path) -> embedded.StackInfo:
    """Start the stack in `own_home`. Tests with this fixture run after the tests of its start."""
    return embedded.up(own_home, dashboard=DASHBOARD_COMMAND)


@dataclass
class PostgresServer:
    """An embedded Postgres with the roles of a deployment and a migrated database `template`, which tests copy."""

    port: int
    admin_url: str
    databases: Databases
    template: str = "hpsearch_template"

    def url(self, database: str, *, user: str = WORKER, password: str | None = None) -> str:
        """Return the URL of a database for one of the roles (whose passwords are their names) or another user."""
        return build_url(
            user=user,
            password=password or user,
            host="127.0.0.1",
            port=self.port,
            database=database,
            query="sslmode=disable",
        )

    def execute(self, statement: str, *names: str) -> None:
        """Run a statement as superuser, outside of a transaction, with `{}` replaced by quoted names."""
        execute(self.admin_url, sql.SQL(statement).format(*map(sql.Identifier, names)))


def execute(url: str, *statements: str | sql.Composable) -> None:
    """Run statements, each in a separate transaction."""
    connection = psycopg2.connect(url.replace("+psycopg2", ""))
    connection.autocommit = True
    try:
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
    finally:
        connection.close()


def forget_power_cuts(admin_url: str) -> None:
    """Turn off waiting for the disk on a test server, because this is the slowest part of creating a database.

    Written data still survive any end of the server's processes.
    """
    settings = ("fsync", "full_page_writes")
    execute(admin_url, *(f"ALTER SYSTEM SET {name} = off" for name in settings), "SELECT pg_reload_conf()")


def _make_logins_cheap(admin_url: str, password: str) -> None:
    """Derive keys of passwords in one iteration instead of 4,096, which take longer than the rest of a connection."""
    superuser = sql.Identifier(SUPERUSER)
    execute(
        admin_url,
        sql.SQL("ALTER ROLE {} SET scram_iterations = 1").format(superuser),  # for roles that it creates
        "SET scram_iterations = 1",
        sql.SQL("ALTER ROLE {} PASSWORD {}").format(superuser, sql.Literal(password)),
    )


@pytest.fixture(scope="session")
def postgres_server(_no_settings_of_the_user: None, pytestconfig: pytest.Config) -> PostgresServer:
    """Start a Postgres without the rest of the stack, which takes two seconds; all tests share it."""
    home = pytestconfig.stash[_SHARED] / "postgres"
    with FileLock(home.with_suffix(".lock")):
        known = home / "server.json"
        if known.exists():
            port, admin = json.loads(known.read_text())
            return PostgresServer(port, admin, _databases(admin))
        (home / "logs").mkdir(parents=True)
        home.chmod(0o755)
        embedded_server = EmbeddedPostgres(make_postgres_folder(home), home / "logs" / "postgres.log", has_port=True)
        port = embedded_server.start(None)
        admin = embedded_server.make_url(port)
        forget_power_cuts(admin)
        _make_logins_cheap(admin, embedded_server.password)
        server = PostgresServer(port, admin, _databases(admin))
        server.execute("CREATE DATABASE {} OWNER {}", server.template, OWNER)
        migrate(server.url(server.template, user=OWNER))
        known.write_text(json.dumps([port, admin]))
        return server


def _databases(admin: str) -> Databases:
    return create_databases(admin, owner_password=OWNER, worker_password=WORKER, mlflow_password="mlflow")


@pytest.fixture(scope="session")
def zygote(
    _no_settings_of_the_user: None, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Zygote]:
    """Return the shared process that has all libraries loaded and forks commands."""
    made = Zygote(server_in(pytestconfig.stash[_SHARED] / "zygote"), tmp_path_factory.mktemp("zygote"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def guarded_homes(_no_settings_of_the_user: None) -> Callable[[], AbstractContextManager[Path]]:
    """Return a function that creates home folders as `guarded_home` does, for fixtures of a wider scope."""
    return guarded_home


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Return an empty folder that every user can enter, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory(prefix="hpsearch-test-") as folder:
        path = Path(folder).resolve()
        path.chmod(0o755)
        yield path


@pytest.fixture
def fresh_home(_no_settings_of_the_user: None) -> Iterator[Path]:
    """Return the path of a home folder that does not exist yet. Services started there are stopped at the end."""
    with guarded_home() as home:
        yield home


_numbers = itertools.count()


@pytest.fixture(scope="session")
def database_pool(postgres_server: PostgresServer) -> Pool:
    """Return the databases of this process on `postgres_server`."""
    admin = sa.make_url(postgres_server.admin_url).set(drivername="postgresql")

    def url_of(name: str) -> str:
        return admin.set(database=name).render_as_string(hide_password=False)

    return Pool(url_of, postgres_server.template, OWNER)


@pytest.fixture
def database(database_pool: Pool, request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the name of a migrated database without rows on `postgres_server`."""
    name = f"test_{os.getpid()}_{next(_numbers)}"
    database_pool.take(name, new=request.node.get_closest_marker("new_database") is not None)
    yield name
    database_pool.give_back(name)


@pytest.fixture
def database_url(postgres_server: PostgresServer, database: str) -> str:
    """Return the URL of a new, migrated database for the worker role, which cannot change the schema."""
    return postgres_server.url(database)


@pytest.fixture
def owner_url(postgres_server: PostgresServer, database: str) -> str:
    """Return the URL of the same database as `database_url` for its owner."""
    return postgres_server.url(database, user=OWNER)


@pytest.fixture
def empty_database_url(postgres_server: PostgresServer) -> Iterator[str]:
    """Return the URL of a new database without tables for its owner."""
    name = f"test_{os.getpid()}_{next(_numbers)}"
    postgres_server.execute("CREATE DATABASE {} OWNER {} TEMPLATE template0 STRATEGY file_copy", name, OWNER)
    yield postgres_server.url(name, user=OWNER)
    postgres_server.execute("DROP DATABASE {} WITH (FORCE)", name)


@pytest.fixture(autouse=True)
def _keep_tracking_server() -> Iterator[None]:
    """Restore MLflow's tracking server of this process, which later tests with a server of the session use."""
    mlflow: Any = sys.modules.get("mlflow")
    before = None if mlflow is None else mlflow.get_tracking_uri()
    yield
    if before is not None:
        mlflow.set_tracking_uri(before)
