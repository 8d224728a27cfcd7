"""PgBouncer in transaction mode, where each transaction can use another connection."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg2
import pytest
import sqlalchemy as sa

from hpsearch.storage.embedded import state
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage

if TYPE_CHECKING:
    from tests.conftest import PostgresServer
from tests.factories import X
from tests.storage.conftest import Open
from tests.storage.shaking import check, run_trials


@pytest.fixture
def storage(opened: Open) -> PostgresStorage:
    return opened("shaken", retry_seconds=60)


@pytest.fixture
def bouncer(postgres_server: PostgresServer, database: str, open_folder: Path) -> Iterator[str]:
    """Return the URL of the database through PgBouncer in transaction mode, with two connections in total."""
    binary = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if binary is None:
        pytest.skip("PgBouncer is not installed")
    port, url = state.choose_port(), sa.make_url(postgres_server.url(database))
    config = open_folder / "pgbouncer.ini"
    config.write_text(
        f"""[databases]
{database} = host=127.0.0.1 port={postgres_server.port} user={url.username} password={url.password}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 2
server_reset_query =
"""
    )
    user = pwd.getpwnam("nobody").pw_name if os.geteuid() == 0 else None
    process = subprocess.Popen(
        [binary, "-q", str(config)], user=user, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    through = url.set(port=port)
    try:
        while True:
            assert process.poll() is None, "PgBouncer ended"
            try:
                psycopg2.connect(through.set(drivername="postgresql").render_as_string(hide_password=False)).close()
                break
            except psycopg2.OperationalError:
                time.sleep(0.05)
        yield through.render_as_string(hide_password=False)
    finally:
        process.terminate()
        process.wait()


def test_storage_works_with_pgbouncer_in_transaction_mode(
    bouncer: str, storage: PostgresStorage, study_id: int
) -> None:
    """There are more clients than connections, and each transaction can use another connection."""
    shared = [open_storage(bouncer, application_name=f"b{n}", retry_seconds=30) for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda s: run_trials(s, study_id, 4), shared))
    check(storage, study_id, made)
    trial_id = shared[0].create_new_trial(study_id)
    with shared[0].batch_writes(trial_id):
        shared[0].set_trial_param(trial_id, "x", 0.5, X)
    assert shared[1].get_trial(trial_id).params == {"x": 0.5}
    for opened in shared:
        opened.engine.dispose()
