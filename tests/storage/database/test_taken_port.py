"""Another user's process on the former port of the embedded Postgres, which forwards logins to its new port."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from hpsearch.storage.backup.dumps import find_programs, run_program
from hpsearch.storage.database.connect import check_database, find_database_error, make_engine
from hpsearch.storage.database.migrate import migrate
from hpsearch.storage.database.retry import is_transient
from hpsearch.storage.database.roles import OWNER
from hpsearch.storage.embedded.postgres import make_database_url
from hpsearch.storage.errors import ServiceUnavailableError, StorageError
from hpsearch.storage.mlflow.server import _check_database_user
from hpsearch.storage.sockets import LOOPBACK, find_server_users
from tests.second_user import listen_as_second_user, needs_root

_REASON = r"port \d+ of the embedded Postgres belongs to a process of another user"


@contextmanager
def _relay(target: int) -> Iterator[tuple[int, Callable[[], bytes]]]:
    """Forward connections to a port as the second user; yield its port, and a function that returns received data."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)

    def serve(client: socket.socket) -> None:
        with client, socket.socket() as server:
            server.connect(("127.0.0.1", target))
            other = {client: server, server: client}
            while True:
                for end in select.select([client, server], [], [])[0]:
                    if not (data := end.recv(1 << 16)):
                        return
                    other[end].sendall(data)
                    if end is client:
                        os.write(writer, data)

    def read_received() -> bytes:
        try:
            return os.read(reader, 1 << 16)
        except BlockingIOError:
            return b""

    with listen_as_second_user(serve) as port:
        yield port, read_received
    os.close(reader)
    os.close(writer)


def _make_url(server: Any, port: int, database: str) -> str:
    users = find_server_users(server.port)
    assert users
    return make_database_url(OWNER, OWNER, LOOPBACK, port, database, uid=users.pop())


@needs_root
def test_no_session_goes_through_another_users_process(postgres_server: Any, database: str, tmp_path: Path) -> None:
    with _relay(postgres_server.port) as (port, read_received):
        url = _make_url(postgres_server, port, database)
        with pytest.raises(ServiceUnavailableError, match=_REASON):
            check_database(url, retry_seconds=0.0)
        with pytest.raises(StorageError, match=_REASON):
            migrate(url)
        with pytest.raises(StorageError, match=_REASON):
            run_program(find_programs(1, why="the test"), "pg_dump", f"--file={tmp_path / 'dump'}", url=url)
        engine, mlflow_engine = make_engine(url, application_name="test"), sa.create_engine(url)
        sa.event.listen(mlflow_engine, "do_connect", _check_database_user)
        for each in (engine, mlflow_engine):
            with pytest.raises(sa.exc.OperationalError, match=_REASON) as raised, each.connect():
                pass
            assert is_transient(raised.value)
        assert read_received() == b""


def test_the_server_itself_is_reached_and_a_stopped_one_is_unavailable(postgres_server: Any, database: str) -> None:
    url = _make_url(postgres_server, postgres_server.port, database)
    assert find_database_error(url) is None
    mlflow_engine = sa.create_engine(url)
    sa.event.listen(mlflow_engine, "do_connect", _check_database_user)
    with mlflow_engine.connect():
        pass
    mlflow_engine.dispose()
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    with pytest.raises(ServiceUnavailableError, match="nothing listens at"):
        check_database(_make_url(postgres_server, free, database), retry_seconds=0.0)
