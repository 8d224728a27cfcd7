"""The life cycle of an HTTP service of the stack, tested with a small service that starts fast."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from hpsearch.storage.embedded import process, state, web_service
from hpsearch.storage.embedded.state import ServiceRecord, StackState, load_state
from hpsearch.storage.embedded.web_service import WebService
from hpsearch.storage.errors import StorageError

# Answers each request with 200, or prints an error and exits. -S skips the import of site-packages.
_PROGRAM = """
import socket, sys
if sys.argv[2:]:
    raise SystemExit(f"starting\\n{sys.argv[2]}")
with socket.create_server(("127.0.0.1", int(sys.argv[1])), reuse_port=True) as server:
    while True:
        with server.accept()[0] as client:
            client.recv(4096)
            client.sendall(b"HTTP/1.0 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")
"""

pytestmark = pytest.mark.slow


class Small:
    """Creates the service as each command does: a new object with the state file of the previous command."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.state = StackState()
        self.refusing: list[str] = []
        self.token: str | None = None

    def found(self, record: ServiceRecord | None = None) -> WebService:
        return WebService(
            name="Small",
            health_path="/",
            command=lambda port: ([sys.executable, "-S", "-c", _PROGRAM, str(port), *self.refusing], {}),
            record=record or self.state.mlflow,
            token=lambda: self.token,
            save_state=lambda: self.state.save(self.home),
            home=self.home,
            log=self.home / "small.log",
        )

    def up(self, database_port: int = 1) -> WebService:
        service = self.found()
        service.ensure_started(database_port)
        service.wait_until_healthy()
        return service

    def running(self) -> list[psutil.Process]:
        return process.find_by_marker(self.found().process_marker)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Small]:
    made = Small(tmp_path)
    yield made
    made.refusing.clear()
    made.found().stop()


def pid_of(service: WebService) -> int:
    found = service.find()
    assert found is not None
    return found.pid


def test_a_running_service_is_adopted_unless_it_uses_another_database(small: Small) -> None:
    first = small.up()
    assert first.is_healthy()
    assert pid_of(small.up()) == pid_of(first)
    port, before = first.record.port, pid_of(first)
    again = small.up(database_port=2)
    assert (again.record.port, len(small.running())) == (port, 1)
    assert pid_of(again) != before
    known = load_state(small.home)
    assert known is not None
    assert known.mlflow == again.record, "it is written down"


def test_a_killed_service_restarts_on_its_port_or_another_if_occupied(small: Small) -> None:
    service = small.up()
    port = service.record.port
    assert port is not None
    kill(service)
    assert not service.is_healthy()
    assert small.up().record.port == port
    kill(service)
    with socket.create_server(("127.0.0.1", port)):
        assert small.up().record.port != port
    assert service.is_healthy()
    assert service.record.former_ports == [port], "running clients have this address"


def test_a_stopped_service_and_one_from_before_a_reboot_get_another_port(small: Small) -> None:
    """Another user may have had the port, and a script of his page may still be in the browser."""
    service = small.up()
    service.stop()
    small.up()
    kill(service)
    assert service.record.process is not None
    service.record.process = replace(service.record.process, started=1.0)
    small.up()
    assert len({service.record.port, *service.record.former_ports}) == 3
    assert service.is_healthy()


def kill(service: WebService) -> None:
    victim = service.find()
    assert victim is not None
    victim.kill()
    assert process.wait_for_exit([victim], timeout=300)
    assert service.find() is None


def test_a_hanging_web_service_is_restarted(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    service = small.up()
    hanging = pid_of(service)
    os.kill(hanging, signal.SIGSTOP)
    for name in ("_ATTACH_TIMEOUT", "_REPORT_AFTER"):
        monkeypatch.setattr(web_service, name, 0.5)
    while not service._is_attached():  # otherwise it may still be starting
        time.sleep(0.02)
    lines: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(state, "_PORTS", (service.record.port,))
        with pytest.raises(StorageError, match="almost all ports"):
            service.wait_until_healthy(lines.append)
    assert pid_of(service) == hanging, "it is not stopped, because no other port is free"
    assert lines == [f"Small (process {hanging}) does not answer; waiting up to 0 s", "restarting Small"]
    assert pid_of(small.up()) != hanging
    assert len(small.running()) == 1
    assert service.is_healthy()


@pytest.mark.parametrize("port", [-5, 70_000])
def test_a_port_that_no_server_can_have_is_replaced(small: Small, port: int) -> None:
    """A damaged state file may contain it."""
    small.up()
    small.found().record.port = port
    assert not small.found().is_healthy()
    small.found().stop()
    assert small.up().is_healthy()


def test_a_service_is_found_in_spite_of_replaced_sockets(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objectives replace them by those of a SOCKS proxy, or to use IPv6 only."""
    service = small.up()
    for name in ("socket", "getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, None)
    assert service.is_healthy()
    assert state.is_port_free(state.choose_port())


def test_a_failed_start_has_a_reason_and_is_retried(small: Small) -> None:
    small.refusing.append("the tables are out of date")
    with pytest.raises(StorageError, match=r"^Small ended during its start: the tables are out of date \(see .*log\)$"):
        small.up()
    assert small.running() == []
    small.refusing.clear()
    assert small.up().is_healthy()


def test_a_service_that_ends_after_it_was_found_is_restarted(small: Small) -> None:
    """A killed `restore` or `down` may have sent the signal."""
    first = small.up()
    service = small.found()
    service.ensure_started(1)
    kill(first)
    service.wait_until_healthy()
    assert service.is_healthy()


def test_a_service_without_a_record_is_stopped(small: Small) -> None:
    """After a killed starter or a lost state file, the service is found by its marker."""
    lost = pid_of(small.up())
    small.state = StackState()
    service = small.up()
    assert [one.pid for one in small.running()] == [pid_of(service)] != [lost]
    small.state = StackState()
    assert small.found().stop() is not None
    assert small.running() == []


def test_a_service_with_another_token_is_restarted(small: Small) -> None:
    before = pid_of(small.up())
    small.token = "other"
    assert pid_of(small.up()) != before
    assert len(small.running()) == 1


def test_a_reused_process_id_is_not_killed(small: Small) -> None:
    service = small.up()
    kill(service)
    command = [sys.executable, "-S", "-c", "print(flush=True); input()"]
    bystander = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert bystander.stdout is not None
        bystander.stdout.readline()  # before that, it may have no command line yet
        assert service.record.process is not None
        then = service.record.process
        service.record.process = process.ProcessIdentity(bystander.pid, then.started, then.command)
        assert service.find() is None
        assert service.stop() is None
        assert pid_of(small.up()) != bystander.pid
        assert bystander.poll() is None
    finally:
        bystander.communicate(b"\n")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 99}', '{"version": 1, "mlflow": 3}', None])
def test_a_lost_or_broken_state_file_is_ignored(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "stack.json").write_text(content)
    assert load_state(tmp_path) is None


def test_a_service_in_a_moved_home_is_found_and_restarted(tmp_path: Path) -> None:
    former, current = tmp_path / "former", tmp_path / "current"
    former.mkdir()
    before = pid_of(Small(former).up())
    former.rename(current)
    moved = Small(current)
    state = load_state(current)
    assert state is not None
    moved.state = state
    try:
        assert not moved.state.mlflow.is_of(current)
        assert pid_of(moved.found()) == before
        assert pid_of(moved.up()) != before
        assert moved.state.mlflow.is_of(current)
        former.mkdir()
        assert Small(former).found().stop() is None, "another home at the former path"
    finally:
        moved.found().stop()
    assert not psutil.pid_exists(before)


def test_a_copied_home_does_not_use_the_service_of_the_original(small: Small, tmp_path: Path) -> None:
    service = small.up()
    shutil.copytree(tmp_path, tmp_path / "copy")
    copy = Small(tmp_path / "copy")
    state = load_state(copy.home)
    assert state is not None
    copy.state = state
    assert copy.found().find() is None
    assert copy.found().stop() is None
    assert service.is_healthy()
