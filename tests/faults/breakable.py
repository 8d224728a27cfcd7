"""A Postgres for one test, which can kill it, restart it and cut its connections."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import psycopg2

from hpsearch.storage.database.migrate import migrate
from hpsearch.storage.database.roles import OWNER, WORKER, create_databases
from hpsearch.storage.embedded.postgres import EmbeddedPostgres
from hpsearch.storage.embedded.postgres_account import make_postgres_folder
from hpsearch.storage.urls import build_url
from tests.faults.harness import LEASE, Arena, Worker
from tests.waiting import wait_for


@dataclass
class Breakable:
    """The server, with a migrated database on it.

    Attributes:
        url: of the database, for a worker.
    """

    server: EmbeddedPostgres
    port: int
    url: str

    @classmethod
    def started(cls, home: Path) -> Breakable:
        (home / "logs").mkdir(parents=True)
        home.chmod(0o755)
        server = EmbeddedPostgres(make_postgres_folder(home), home / "logs" / "postgres.log", has_port=True)
        port = server.start(None)
        create_databases(server.make_url(port), owner_password=OWNER, worker_password=WORKER, mlflow_password="m")

        def url(user: str) -> str:
            where = {"host": "127.0.0.1", "port": port, "database": "optuna", "query": "sslmode=disable"}
            return build_url(user=user, password=user, **where)  # type: ignore[arg-type]

        migrate(url(OWNER))
        return cls(server, port, url(WORKER))

    def kill(self) -> None:
        """Kill the server and all its child processes, as a power cut does."""
        process = self.server.find_process()
        assert process is not None
        for victim in [process, *process.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):  # the process of a connection that has just ended
                victim.kill()
        process.wait()

    def away_for_longer_than_a_lease(self, arena: Arena, workers: list[Worker]) -> None:
        """Kill Postgres, let hanging workers continue, start it again; all workers must wait for it and exit with 0."""
        self.kill()
        try:
            (arena.orders / "open").touch()
            back = time.monotonic() + 1.5 * LEASE
            message = "database unavailable, retrying"
            wait_for(lambda: all(message in worker.log.read_text() for worker in workers), "the workers to wait for it")
            wait_for(lambda: time.monotonic() > back, "leases to run out")
        finally:
            self.start()
        wait_for(lambda: arena.poll_workers() or all(worker.ended for worker in workers), "the workers to leave")
        assert {worker.exit_code for worker in workers} == {0}, arena.describe_failure("they did not wait")

    def start(self) -> None:
        """Start it again on the same port."""
        assert self.server.start(self.port) == self.port

    def cut(self) -> int:
        """End every connection except this one; return the number of ended connections."""
        connection = psycopg2.connect(self.server.make_url(self.port).replace("+psycopg2", ""))
        try:
            with connection, connection.cursor() as cursor:
                cursor.execute(
                    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                    "WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
                )
                return int(cursor.fetchone()[0])  # type: ignore[index]
        finally:
            connection.close()
