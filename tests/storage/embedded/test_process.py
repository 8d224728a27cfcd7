from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from hpsearch.storage.embedded import process

_SLEEP = [sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(600)"]
_STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)",
]
# A parent whose child outlives it.
_PARENT = [
    sys.executable,
    "-c",
    "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
    "print('ready', flush=True); time.sleep(600)",
]


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[str]:
    name = f"test:{tmp_path}"
    yield name
    for left in process.find_by_marker(name):
        left.kill()


def _spawn(command: list[str], tmp_path: Path, marker: str) -> process.ProcessIdentity:
    log = tmp_path / "log"
    identity = process.spawn(command, log=log, env={**os.environ, process.MARKER_VARIABLE: marker}, cwd=tmp_path)
    deadline = time.monotonic() + 600
    while "ready" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return identity


def test_a_process_is_identified_by_more_than_its_id(tmp_path: Path, marker: str) -> None:
    identity = _spawn(_SLEEP, tmp_path, marker)
    found = process.find(identity)
    assert found is not None
    assert found.pid == identity.pid
    # The same id of a later process.
    assert process.find(replace(identity, started=identity.started - 100)) is None
    assert process.find(replace(identity, command=("other",))) is None
    assert process.find(process.ProcessIdentity(os.getpid(), identity.started, identity.command)) is None
    assert process.find(None) is None


def test_a_service_outlives_its_starter_in_its_own_session(tmp_path: Path, marker: str) -> None:
    identity = _spawn(_SLEEP, tmp_path, marker)
    assert os.getsid(identity.pid) == identity.pid
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0


def test_a_zombie_does_not_count_as_running(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    found = psutil.Process(child.pid)
    deadline = time.monotonic() + 600
    while found.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not process.is_running(found)
    assert process.wait_for_exit([found], timeout=0)
    child.wait()


def test_an_orphaned_child_is_found_and_stopped(tmp_path: Path, marker: str) -> None:
    identity = _spawn(_PARENT, tmp_path, marker)
    assert len(process.find_by_marker(marker)) == 2
    os.kill(identity.pid, signal.SIGKILL)
    parent = psutil.Process(identity.pid)
    assert process.wait_for_exit([parent], timeout=300)
    (orphan,) = process.find_by_marker(marker)
    assert orphan.pid != identity.pid
    process.stop([orphan], timeout=300)
    assert process.find_by_marker(marker) == []
    assert process.find(identity) is None


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path, marker: str) -> None:
    identity = _spawn(_STUBBORN, tmp_path, marker)
    found = process.find(identity)
    assert found is not None
    process.stop([found], timeout=0.2)
    assert process.find(identity) is None


def test_the_process_that_listens_on_a_port_is_found(tmp_path: Path, marker: str) -> None:
    listen = (
        "import socket, time; s = socket.create_server(('127.0.0.1', 0));"
        "print(s.getsockname()[1], 'ready', flush=True); time.sleep(600)"
    )
    identity = _spawn([sys.executable, "-c", listen], tmp_path, marker)
    port = int((tmp_path / "log").read_text().split()[0])
    assert process.is_listening([psutil.Process(identity.pid)], port)
    assert not process.is_listening([psutil.Process(identity.pid)], port + 1)
    assert not process.is_listening([psutil.Process()], port)


def test_a_large_log_is_rotated(tmp_path: Path, marker: str) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.truncate(process._LOG_LIMIT + 1)
    _spawn(_SLEEP, tmp_path, marker)
    assert (tmp_path / "log.1").stat().st_size == process._LOG_LIMIT + 1
    assert log.read_text() == "ready\n"
