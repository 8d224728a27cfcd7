"""A search whose workers use the deployment's PgBouncer with its own configuration."""

import os
import pwd
import shutil

import psycopg2
import pytest

from tests.deployment.machine import BOUNCER, Machine, free_port

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        not (shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")),
        reason="PgBouncer is not installed",
    ),
]


@pytest.mark.parametrize("machine", [{"HPSEARCH_DB_HOST": "pgbouncer"}], indirect=True)
@pytest.mark.soak
def test_a_search_runs_through_pgbouncer(machine: Machine) -> None:
    assert {name for name in machine.services if BOUNCER in str(machine.services[name].get("environment"))} == {
        *("dashboard", "study", "worker")
    }
    port = machine.ports[6432] = free_port()
    machine.replaced |= {
        BOUNCER: f"@127.0.0.1:{port}",
        "listen_port = 5432": f"listen_port = {port}",
        "/tmp/pgbouncer.users": str(machine.folder / "users" / "list"),
    }
    (machine.folder / "users").mkdir()
    (machine.folder / "users").chmod(0o777)

    machine.finish("migrate")
    user = pwd.getpwnam("nobody").pw_name if os.geteuid() == 0 else None  # it does not run as root
    machine.until_listening("pgbouncer", 6432, user=user)
    wrong = f"postgresql://hpsearch_worker:wrong@127.0.0.1:{port}/optuna"
    with pytest.raises(psycopg2.OperationalError, match="authentication failed"):
        psycopg2.connect(wrong)
    machine.until_healthy("mlflow")
    machine.finish("study")
    machine.finish("worker")
    assert "1 trial" in machine.finish("study")

    with machine.connect("hpsearch_worker", machine.secrets["HPSEARCH_WORKER_PASSWORD"], "optuna") as connection:
        cursor = connection.cursor()
        cursor.execute("SELECT count(*) FROM trials WHERE state IN ('COMPLETE', 'PRUNED')")
        assert cursor.fetchone() == (1,)
    connection.close()
    assert "optuna/hpsearch_worker" in machine.log("pgbouncer"), "the worker came this way"
    assert machine.secrets["HPSEARCH_WORKER_PASSWORD"] not in machine.log("pgbouncer")
