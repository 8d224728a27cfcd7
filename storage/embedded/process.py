"""Processes that outlive the command that started them, and how they are known again.

A process id alone says nothing: it may have been given to another process since. A service is known by its id, its
start time and its command line together. Its environment carries a marker besides, which its children inherit: what
nobody wrote down (because the starter was killed), or what lost its parent, is found by it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

MARKER = "HPSEARCH_SERVICE"
_LOG_LIMIT = 10_000_000  # bytes, after which a log is set aside at the next start
_CLOCK_STEP = 60.0  # seconds; start times move when the clock is set

_children: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True)
class Identity:
    """What a process is known by."""

    pid: int
    started: float  # seconds since the epoch, as psutil gives it
    command: tuple[str, ...]


def spawn(command: Sequence[str], *, log: Path, env: Mapping[str, str], cwd: Path, **options: Any) -> Identity:
    """Start a process in a session of its own, its output appended to `log`.

    Args:
        command: Program and arguments.
        log: Set aside as `*.log.1` when it has grown large.
        env: The whole environment.
        cwd: Working directory.
        **options: Further arguments of `subprocess.Popen`.
    """
    if log.exists() and log.stat().st_size > _LOG_LIMIT:
        log.replace(log.with_name(log.name + ".1"))
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
            **options,
        )
    finally:
        os.close(descriptor)
    _children.append(child)  # so that it is reaped if it ends before we do
    return Identity(child.pid, psutil.Process(child.pid).create_time(), tuple(command))


def find(identity: Identity | None) -> psutil.Process | None:
    """Return the process if it still runs and is still the same one."""
    if identity is None:
        return None
    try:
        process = psutil.Process(identity.pid)
        same = abs(process.create_time() - identity.started) < _CLOCK_STEP
        # Empty for a moment while the program takes the place of its starter, seen where that is done by vfork.
        same = same and process.cmdline() in ([], list(identity.command))
    except psutil.Error:
        return None
    return process if same and is_running(process) else None


def is_running(process: psutil.Process) -> bool:
    """Whether the process exists and is no zombie."""
    for child in _children:
        child.poll()
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def find_marked(marker: str) -> list[psutil.Process]:
    """Return this user's running processes whose environment carries the marker."""
    return [process for process in psutil.process_iter() if is_running(process) and _marker(process) == marker]


def listens(processes: Sequence[psutil.Process], port: int) -> bool:
    """Whether one of the processes is the one that listens on the port."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            for connection in process.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    return True
    return False


def stop(processes: Sequence[psutil.Process], *, timeout: float) -> None:
    """End the processes: SIGTERM, and SIGKILL for what is left after `timeout` seconds."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        send(processes, signal_number)
        if wait(processes, timeout=timeout):
            return


def send(processes: Sequence[psutil.Process], signal_number: signal.Signals) -> None:
    """Send a signal to those that still run, and wake those that are suspended, or they would not heed it."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal_number)
            process.send_signal(signal.SIGCONT)


def wait(processes: Sequence[psutil.Process], *, timeout: float) -> bool:
    """Wait until none of the processes runs; False if one still does after `timeout` seconds.

    A zombie, whose parent is somebody who does not look (as in a container without an init), does not run.
    """
    return wait_until(lambda: not any(map(is_running, processes)), timeout=timeout)


def wait_until(condition: Callable[[], bool], *, timeout: float) -> bool:
    """Wait for what no event reports; False if the condition is still false after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.03)
    return True


def tail(log: Path, *, lines: int = 1) -> str:
    """Return the last lines of a log, joined to one."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return ""
    return " ".join(line.strip() for line in text.splitlines()[-lines:])


def _marker(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(MARKER)
    except (psutil.Error, OSError):
        return None
