"""Commands that wait for the database: signals, and timeouts of the server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import sqlalchemy as sa

from hpsearch.search.cli import run_command
from tests.conftest import PostgresServer
from tests.waiting import wait_for

_IS_WAITING = sa.text(
    "SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
)


@pytest.mark.parametrize(
    ("number", "code", "text"), [(signal.SIGINT, 130, "hpsearch: interrupted\n"), (signal.SIGTERM, 143, "")]
)
def test_a_signal_ends_a_command_that_waits_for_the_database(
    owner_url: str, number: signal.Signals, code: int, text: str
) -> None:
    engine = sa.create_engine(owner_url)
    with engine.connect() as locking, engine.connect().execution_options(isolation_level="AUTOCOMMIT") as watching:
        locking.execute(sa.text("LOCK TABLE studies IN ACCESS EXCLUSIVE MODE"))
        command = [sys.executable, "-m", "hpsearch", "studies"]
        environment = {**os.environ, "HPSEARCH_STORAGE_URL": owner_url}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        wait_for(lambda: watching.execute(_IS_WAITING).scalar_one(), "the command to wait for the table")
        process.send_signal(number)
        assert process.communicate(timeout=120) == ("", text)
        assert process.returncode == code


def test_a_statement_that_a_timeout_of_the_server_cancels_is_no_mistake_of_the_user(
    postgres_server: PostgresServer, database: str, owner_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Engines do not restart workers after exit code 2."""
    engine = sa.create_engine(owner_url)
    postgres_server.execute("ALTER DATABASE {} SET lock_timeout = 100", database)
    try:
        with engine.connect() as locking:
            locking.execute(sa.text("LOCK TABLE studies IN ACCESS EXCLUSIVE MODE"))
            assert run_command(["studies", "--storage-url", owner_url]) == 1
    finally:
        postgres_server.execute("ALTER DATABASE {} RESET lock_timeout", database)
    error = capsys.readouterr().err
    assert error.startswith("hpsearch: the database cancelled a statement (canceling statement due to lock timeout"), (
        error
    )
    assert error.endswith("repeat the command, or raise statement_timeout or lock_timeout of the server\n")
