"""The whole embedded stack: concurrent starts, kills, reused process ids, lost files."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import mlflow
import optuna
import psutil
import psycopg2
import pytest
from optuna.study import StudyDirection

from hpsearch.search.services import DASHBOARD_COMMAND
from hpsearch.storage.attributes import RUN_URL
from hpsearch.storage.database.connect import check_database, open_cursor
from hpsearch.storage.database.roles import WORKER
from hpsearch.storage.embedded import process, web_service
from hpsearch.storage.embedded.services import EmbeddedStack
from hpsearch.storage.embedded.stack import StackInfo, down, find_running, read_status, revive, up
from hpsearch.storage.embedded.state import StackState, is_port_free, load_state
from hpsearch.storage.errors import StorageError
from hpsearch.storage.mlflow.artifacts import remove_probe, write_probe
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.study_storage.storage import open_storage
from hpsearch.storage.web.token import is_embedded
from tests.faults.harness import Zygote
from tests.full_disk import full_disk
from tests.second_user import listen_as_second_user, needs_root
from tests.waiting import wait_for
from tests.web import open_url

if TYPE_CHECKING:
    from tests.storage.conftest import OrdinaryUser

_UP = """
import sys, time
from pathlib import Path
from hpsearch.search.services import DASHBOARD_COMMAND
from hpsearch.storage.embedded.stack import up
info = up(Path(sys.argv[1]), dashboard=DASHBOARD_COMMAND, progress=lambda line: print(line, flush=True))
print(info.tracking_uri, flush=True)
"""
_NAMES = ["Postgres", "MLflow", "Optuna dashboard"]


# In one group with the other tests that break the stack of `own_home`, each of which gets it as the previous left it.
pytestmark = pytest.mark.xdist_group("faults")


@pytest.fixture
def home(own_home: Path) -> Path:
    return own_home


def _pids(home: Path) -> dict[str, int | None]:
    return {service.name: service.pid for service in read_status(home)}


def _states(home: Path) -> dict[str, str]:
    return {service.name: service.state for service in read_status(home)}


def _kill(home: Path, name: str) -> None:
    pid = _pids(home)[name]
    assert pid is not None
    victim = psutil.Process(pid)
    victim.kill()
    assert process.wait_for_exit([victim], timeout=300)


def _processes(home: Path) -> list[psutil.Process]:
    """Return every process of the stack in `home`."""
    found = [one for name in ("MLflow", "Optuna dashboard") for one in process.find_by_marker(f"{name}:{home}")]
    for one in psutil.process_iter():
        try:
            if f"{home}/postgres/data" in one.cmdline():
                found.append(one)
        except psutil.Error:
            continue
    return found


def _get(url: str) -> bytes:
    with open_url(url) as response:
        body: bytes = response.read()
        return body


def _works(stack: StackInfo) -> None:
    check_database(stack.storage_url)
    check_database(stack.owner_url)
    mlflow.MlflowClient(stack.tracking_uri).search_experiments()
    assert b"study_summaries" in _get(f"{stack.dashboard_url}/api/studies")


def test_down_and_status_without_services(tmp_path: Path) -> None:
    home = tmp_path / "none"
    assert down(home) == []
    assert find_running(home) is None
    assert [(service.name, service.state) for service in read_status(home)] == [(name, "stopped") for name in _NAMES]
    assert not home.exists()


@pytest.mark.soak  # starts the stack at each step; other tests start or adopt it
def test_starts_killed_at_every_step_and_four_concurrent_starts(home: Path, zygote: Zygote) -> None:
    """In a new home."""
    for step in ("setting up Postgres", "starting MLflow", "starting the Optuna dashboard"):
        starter = zygote.python(_UP, home)
        wait_for(lambda: starter.poll() is not None or step in starter.log.read_text(), f"{step!r}")  # noqa: B023 called at once
        assert starter.poll() is None, f"{step!r} was never reached: {starter.log.read_text()}"
        starter.kill()
        starter.wait()

    starters = [zygote.python(_UP, home) for _ in range(4)]
    output = [starter.communicate()[0] for starter in starters]

    assert [starter.returncode for starter in starters] == [0] * 4, output
    assert len({out.splitlines()[-1] for out in output}) == 1
    processes = _processes(home)
    assert len([one for one in processes if "mlflow" in one.cmdline()]) == 1
    assert len([one for one in processes if "dashboard" in one.cmdline()]) == 1
    assert len([one for one in processes if Path(one.cmdline()[0]).name == "postgres"]) == 1
    stack = find_running(home)
    assert stack
    _works(stack)


def test_up_is_idempotent_and_all_services_work(home: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    stack = up(home, dashboard=DASHBOARD_COMMAND)
    assert _states(home) == dict.fromkeys(_NAMES, "running")
    _works(stack)

    before = _pids(home)
    assert up(home, progress=lines.append, dashboard=DASHBOARD_COMMAND) == find_running(home) == stack
    assert (lines, _pids(home)) == ([], before)

    study = optuna.create_study(study_name="shown", storage=stack.storage_url)
    study.add_trial(optuna.trial.create_trial(value=0.25))
    assert b'"shown"' in _get(f"{stack.dashboard_url}/api/studies")
    assert b"Optuna" in _get(f"{stack.dashboard_url}/dashboard")

    client = mlflow.MlflowClient(stack.tracking_uri)
    run = client.create_run(client.create_experiment("test artifacts"))
    (tmp_path / "weights #1 %.txt").write_text("abc")
    client.log_artifact(run.info.run_id, str(tmp_path / "weights #1 %.txt"))
    got = client.download_artifacts(run.info.run_id, "weights #1 %.txt", str(tmp_path))
    assert Path(got).read_text() == "abc"
    stored = [path for path in (home / "artifacts").rglob("*") if path.is_file()]
    assert [path.read_text() for path in stored] == ["abc"]
    tracking = Tracking(stack.tracking_uri)
    remove_probe(tracking, write_probe(tracking))
    assert [path for path in (home / "artifacts").rglob("*") if path.is_file()] == stored
    _check_status_without_free_connections(home)


def test_services_listen_on_loopback_and_protect_their_secrets(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of the user")
    stack = up(home, dashboard=DASHBOARD_COMMAND)
    server = psutil.Process(_pids(home)["Postgres"])
    assert not {"AWS_SECRET_ACCESS_KEY", "HOME"} & server.environ().keys(), "Postgres may have another account"
    state = json.loads((home / "stack.json").read_text())
    secrets = [value for name, value in state.items() if name.endswith("_password")]
    secrets.append((home / "postgres" / "password").read_text())
    assert len(secrets) == 4
    processes = _processes(home)
    assert len(processes) >= 4
    for one in processes:
        assert not any(secret in part for secret in secrets for part in one.cmdline())
        listening = [item.laddr.ip for item in one.net_connections() if item.status == psutil.CONN_LISTEN]
        assert set(listening) <= {"127.0.0.1"}
    for log in (home / "logs").iterdir():
        assert not any(secret in log.read_text() for secret in secrets)
        assert stat.S_IMODE(log.stat().st_mode) == 0o600
    for name, mode in (("stack.json", 0o600), ("postgres/password", 0o600), ("logs", 0o700), ("artifacts", 0o700)):
        assert stat.S_IMODE((home / name).stat().st_mode) == mode
    shown = " ".join(f"{service.url} {service.detail}" for service in read_status(home))
    assert not any(secret in shown for secret in secrets)
    assert stack.storage_url != stack.owner_url


def _check_status_without_free_connections(home: Path) -> None:
    state = load_state(home)
    assert state is not None
    server, port = EmbeddedStack(home, state).server, state.postgres.port
    assert server is not None
    assert port is not None
    with open_cursor(server.make_url(port), application_name="test", autocommit=True) as cursor:
        cursor.execute(f"ALTER ROLE {WORKER} CONNECTION LIMIT 0")
        try:
            status = read_status(home)[0]
        finally:
            cursor.execute(f"ALTER ROLE {WORKER} CONNECTION LIMIT -1")
    assert status.state == "running"
    assert status.detail.startswith("it rejects connections: ")
    assert "too many connections" in status.detail
    assert "\n" not in status.detail


@pytest.mark.soak
def test_a_service_killed_with_sigkill_is_restarted(home: Path) -> None:
    """A test below covers a failed start."""
    stack = up(home, dashboard=DASHBOARD_COMMAND)
    _revive_after_two_kills(home)
    before = _pids(home)
    _kill(home, "Postgres")
    assert find_running(home) is None
    assert _states(home)["Postgres"] == "dead"
    assert up(home, dashboard=DASHBOARD_COMMAND) == stack  # at the same addresses
    _was_started_again(stack, "Postgres", before)


def _revive_after_two_kills(home: Path) -> None:
    """Kill Postgres while MLflow is being restarted: MLflow cannot answer before Postgres does."""
    _kill(home, "MLflow")
    revive(home, dashboard=DASHBOARD_COMMAND)
    assert _states(home)["MLflow"] in {"starting", "running"}
    _kill(home, "Postgres")
    revive(home, dashboard=DASHBOARD_COMMAND)
    assert _states(home)["Postgres"] == "running"

    def is_up() -> bool:
        if find_running(home) is None and "dead" in _states(home).values():
            revive(home, dashboard=DASHBOARD_COMMAND)
        return find_running(home) is not None

    wait_for(is_up, "all services to answer")


@needs_root
@pytest.mark.soak  # test_taken_ports.py tests the clients
def test_services_whose_ports_another_user_has_taken_are_restarted_on_others(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    stack = up(home, dashboard=DASHBOARD_COMMAND)
    state = load_state(home)
    assert state is not None
    with ExitStack() as taken:
        for name, port in (("Postgres", state.postgres.port), ("MLflow", state.mlflow.port)):
            assert port is not None
            orphans = process.find_by_marker(f"{name}:{home}")
            _kill(home, name)
            process.send_signal(orphans, signal.SIGKILL)
            wait_for(partial(is_port_free, port), f"the end of the children of {name}")
            taken.enter_context(listen_as_second_user(port=port))
        assert [_states(home)[name] for name in ("Postgres", "MLflow")] == ["dead", "dead"]
        moved = up(home, dashboard=DASHBOARD_COMMAND)
        _works(moved)
        assert not {stack.storage_url, stack.tracking_uri} & {moved.storage_url, moved.tracking_uri}
        assert is_embedded(stack.tracking_uri)
        with pytest.raises(mlflow.MlflowException, match="belongs to a process of another user"):
            mlflow.MlflowClient(stack.tracking_uri).search_experiments()


def _was_started_again(stack: StackInfo, name: str, before: dict[str, int | None]) -> None:
    after = _pids(stack.home)
    assert after.pop(name) != before.pop(name)
    assert after == before  # the others were adopted
    _works(stack)


@pytest.mark.soak  # of a small service: test_web_service.py
def test_a_hanging_service_is_restarted(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = up(home, dashboard=DASHBOARD_COMMAND)
    pid = _pids(home)["Optuna dashboard"]
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    for name in ("_ATTACH_TIMEOUT", "_REQUEST_TIMEOUT"):
        monkeypatch.setattr(web_service, name, 3.0)
    assert read_status(home)[2].state == "dead"
    assert "does not answer" in read_status(home)[2].detail
    assert up(home, dashboard=DASHBOARD_COMMAND) == stack
    assert _pids(home)["Optuna dashboard"] != pid
    _works(stack)


@pytest.mark.soak  # test_web_service.py tests a small service, the test of `down` below all services
def test_a_lost_or_broken_state_file_is_harmless(home: Path) -> None:
    study = optuna.create_study(study_name="kept", storage=up(home, dashboard=DASHBOARD_COMMAND).storage_url)
    study.add_trial(optuna.trial.create_trial(value=0.5))
    for content in ("", "{", "[]", '{"version": 99}', '{"version": 1, "mlflow": 3}', None):
        (home / "stack.json").unlink(missing_ok=True)
        if content is not None:
            (home / "stack.json").write_text(content)
        assert find_running(home) is None
        assert _states(home)["MLflow"] == "stopped"
    stack = up(home, dashboard=DASHBOARD_COMMAND)
    _works(stack)
    assert optuna.load_study(study_name="kept", storage=stack.storage_url).best_value == 0.5
    assert len({one.pid for one in _processes(home) if "mlflow" in one.cmdline()}) == 1  # the old one was stopped


@pytest.mark.soak  # of a small service: test_web_service.py
def test_reused_process_ids_are_not_killed_and_failed_starts_have_a_reason(home: Path) -> None:
    """All are killed. Then one of them cannot start at first, and later restarts alone."""
    stack = up(home, dashboard=DASHBOARD_COMMAND)
    revision = _set_mlflows_revision(stack, "451aebb31d03")
    for name in _NAMES:
        _kill(home, name)
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        state = json.loads((home / "stack.json").read_text())
        for name in ("postgres", "mlflow", "dashboard"):
            state[name]["process"]["pid"] = bystander.pid
        (home / "stack.json").write_text(json.dumps(state))
        pid_file = home / "postgres" / "data" / "postmaster.pid"
        lines = pid_file.read_text().splitlines()
        pid_file.write_text("\n".join([str(bystander.pid), *lines[1:]]) + "\n")

        assert _states(home) == dict.fromkeys(_NAMES, "dead")
        down(home)
        assert bystander.poll() is None
        taken = int(stack.dashboard_url.rsplit(":", 1)[1])
        with (
            socket.create_server(("127.0.0.1", taken)),
            pytest.raises(StorageError, match=r"^MLflow ended during its start: .*out-of-date.*mlflow\.log") as raised,
        ):
            up(home, dashboard=DASHBOARD_COMMAND)
        assert "\n" not in str(raised.value)
        wait_for(lambda: _states(home)["Optuna dashboard"] == "running", "the dashboard")
        assert _states(home) == {"Postgres": "running", "MLflow": "dead", "Optuna dashboard": "running"}
        assert bystander.poll() is None
        assert bystander.pid not in _pids(home).values()
    finally:
        bystander.communicate(b"\n")
    _set_mlflows_revision(stack, revision)
    before = _pids(home)
    begun = EmbeddedStack(home, load_state(home) or StackState())
    begun.mlflow.ensure_started(begun.state.postgres.port or 0)
    assert _states(home)["MLflow"] == "starting"  # the start of MLflow takes some seconds
    again = up(home, dashboard=DASHBOARD_COMMAND)
    assert again.dashboard_url != stack.dashboard_url
    assert again.tracking_uri != stack.tracking_uri, "after a stop, another user may have had the port"
    assert again.storage_url == stack.storage_url
    _was_started_again(again, "MLflow", before)


def _set_mlflows_revision(stack: StackInfo, revision: str) -> str:
    """Store another schema revision in MLflow's database; return the previous one."""
    port = stack.storage_url.rsplit(":", 1)[1].split("/")[0]
    password = (stack.home / "postgres" / "password").read_text()
    connection = psycopg2.connect(f"postgresql://postgres:{password}@127.0.0.1:{port}/mlflow")
    with connection, connection.cursor() as cursor:
        cursor.execute("SELECT version_num FROM alembic_version")
        ((before,),) = cursor.fetchall()
        cursor.execute("UPDATE alembic_version SET version_num = %s", (revision,))
    connection.close()
    return str(before)


@pytest.mark.soak  # only if the tests run as root; otherwise all tests of a stack cover this
def test_the_stack_runs_as_an_ordinary_user(ordinary_user: OrdinaryUser, open_folder: Path) -> None:
    login = ordinary_user.own(open_folder / "a login")
    home = login / ".local" / "share" / "hpsearch"
    code = _UP.replace("sys.argv[1]", "__import__('hpsearch.storage.home').storage.home.prepare_home()")
    stop = (
        "import sys; from pathlib import Path; from hpsearch.storage.embedded.stack import down; "
        "print(down(Path(sys.argv[1])))"
    )
    try:
        started = ordinary_user.python(code, HOME=str(login))
        assert started.returncode == 0, started.stderr
        processes = _processes(home)
        assert len(processes) >= 4
        assert {one.uids().effective for one in processes} == {ordinary_user.uid}
        assert {path.stat().st_uid for path in home.rglob("*")} == {ordinary_user.uid}
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
    finally:
        stopped = ordinary_user.python(stop, home, HOME=str(login))
    assert stopped.stdout.count("process") == 3
    assert _processes(home) == []


@pytest.mark.soak  # its parts: test_web_service.py, test_postgres.py and test_mlflow_links.py
def test_a_home_that_is_moved_while_its_services_run(own_stack: StackInfo) -> None:
    """Its MLflow gets another port too."""
    home, before = own_stack.home, load_state(own_stack.home)
    assert before is not None
    assert before.mlflow.port is not None
    storage = open_storage(own_stack.storage_url, application_name="test")
    study_id = storage.create_new_study([StudyDirection.MAXIMIZE], "moved")
    storage.set_study_user_attr(study_id, RUN_URL, f"{own_stack.tracking_uri}/#/experiments/1/runs/r")
    storage.engine.dispose()
    moved = home.with_name("moved")
    home.rename(moved)
    try:
        assert find_running(moved) is None, "MLflow and the dashboard have the former path"
        assert len(down(moved)) == 3
        assert _processes(home) == _processes(moved) == []
        with socket.create_server(("127.0.0.1", before.mlflow.port)):
            stack = up(moved, dashboard=DASHBOARD_COMMAND)
        _works(stack)
        assert stack.tracking_uri != own_stack.tracking_uri
        attrs = open_storage(stack.storage_url, application_name="test").get_study_user_attrs(study_id)
        assert attrs[RUN_URL] == f"{stack.tracking_uri}/#/experiments/1/runs/r"
        down(moved)
    finally:
        moved.rename(home)


@pytest.mark.soak
def test_down_stops_all_services_also_without_the_state_file(own_stack: StackInfo) -> None:
    """And on a full disk."""
    home = own_stack.home
    (home / "stack.json").unlink()
    with full_disk():
        assert [line.split(" (")[0] for line in down(home)] == _NAMES[::-1]
    assert _processes(home) == []
    assert down(home) == []
    assert _states(home) == dict.fromkeys(_NAMES, "stopped")
    assert find_running(home) is None


def test_a_port_that_no_server_can_have_is_not_free() -> None:
    assert not is_port_free(70_000), "a damaged state file may contain it"
