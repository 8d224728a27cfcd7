from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpsearch.storage.embedded.postgres import EmbeddedPostgres
from hpsearch.storage.embedded.postgres_account import make_postgres_folder
from tests.deployment.machine import PASSWORDS, Machine, compose, free_port, tool
from tests.faults.harness import Zygote


@pytest.fixture
def machine(request: pytest.FixtureRequest, fresh_home: Path, open_folder: Path, zygote: Zygote) -> Iterator[Machine]:
    """The deployment by the settings that are the fixture's parameter, with nothing started but Postgres."""
    fresh_home.mkdir(mode=0o755)
    server = EmbeddedPostgres(make_postgres_folder(fresh_home), fresh_home / "postgres.log", has_port=True)
    ports = {5432: server.start(None), **{port: free_port() for port in (5000, 8080, 443, 5443)}}
    secrets = dict(line.split("=", 1) for line in tool("hpsearch", "secrets").stdout.splitlines())
    assert set(secrets) >= set(PASSWORDS)
    secrets["POSTGRES_PASSWORD"] = server.password
    model = compose(**secrets, HPSEARCH_TRIALS="1", **getattr(request, "param", {}))
    machine = Machine(open_folder, server, model, secrets, ports, zygote)
    try:
        yield machine
    finally:
        for process in machine.running:
            process.terminate()
        for process in machine.running:
            process.wait()
        server.stop()
