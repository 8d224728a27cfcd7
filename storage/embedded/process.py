"""Background processes that outlive the command that started them, and their identification.

A process id alone does not identify a process, because the system reuses ids. A service is identified by process id,
start time and command line. The environment of a service also contains a marker, which its child processes inherit.
The marker finds orphaned child processes, and services that were not recorded because their starter was killed.
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

MARKER_VARIABLE = "HPSEARCH_SERVICE"
_LOG_LIMIT = 10_000_000  # bytes; a larger log is rotated at the next start
_CLOCK_STEP = 60.0  # seconds; start times shift when the clock is adjusted

_children: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True)
class ProcessIdentity:
    """Identification of a process, which remains valid when the system reuses the process id."""

    pid: int
    started: float  # unix seconds, from psutil
    command: tuple[str, ...]


def spawn(command: Sequence[str], *, log: Path, env: Mapping[str, str], cwd: Path, **options: Any) -> ProcessIdentity:
    """Start a process in a new session and append its output to `log`.

    Args:
        command: program and arguments.
        log: log file; a file of more than 10 MB is first renamed to `*.log.1`.
        env: complete environment of the process.
        cwd: working directory of the process.
        **options: further arguments of `subprocess.Popen`.
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
    _children.append(child)  # for reaping, if it ends before this process
    return ProcessIdentity(child.pid, psutil.Process(child.pid).create_time(), tuple(command))


def find(identity: ProcessIdentity | None) -> psutil.Process | None:
    """Return the process with this identity; None if it does not run any more."""
    if identity is None:
        return None
    try:
        process = psutil.Process(identity.pid)
        is_same = abs(process.create_time() - identity.started) < _CLOCK_STEP
        # The command line is empty for a moment between vfork and exec.
        is_same = is_same and process.cmdline() in ([], list(identity.command))
    except psutil.Error:
        return None
    return process if is_same and is_running(process) else None


def has_working_folder(process: psutil.Process, folder: Path) -> bool | None:
    """Return whether a process works in a folder, also if the folder was moved meanwhile; None if that is unknown.

    The folder of a running service identifies its home: a copied home contains the records of the original's services.
    """
    try:
        return Path(process.cwd()).samefile(folder)
    except (psutil.Error, OSError):
        return None


def is_running(process: psutil.Process) -> bool:
    """Return whether the process exists and is not a zombie."""
    for child in _children:
        child.poll()
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def find_by_marker(marker: str) -> list[psutil.Process]:
    """Return the running processes of this user whose environment contains the marker."""
    return [process for process in psutil.process_iter() if is_running(process) and _read_marker(process) == marker]


def is_listening(processes: Sequence[psutil.Process], port: int) -> bool:
    """Return whether one of the processes listens on the TCP port."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            for connection in process.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    return True
    return False


def stop(processes: Sequence[psutil.Process], *, timeout: float) -> None:
    """End the processes with SIGTERM, and those that still run after `timeout` seconds with SIGKILL."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        send_signal(processes, signal_number)
        if wait_for_exit(processes, timeout=timeout):
            return


def send_signal(processes: Sequence[psutil.Process], signal_number: signal.Signals) -> None:
    """Send a signal to the processes, and resume suspended processes, which would not handle the signal otherwise."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal_number)
            process.send_signal(signal.SIGCONT)


def wait_for_exit(processes: Sequence[psutil.Process], *, timeout: float) -> bool:
    """Wait until all processes have exited; return False if a process still runs after `timeout` seconds.

    A zombie is treated as exited, because a container without an init process may never reap it.
    """
    return wait_until(lambda: not any(map(is_running, processes)), timeout=timeout)


def wait_until(condition: Callable[[], bool], *, timeout: float) -> bool:
    """Poll a condition until it is true; return False if it is still false after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.03)
    return True


def _read_marker(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(MARKER_VARIABLE)
    except (psutil.Error, OSError):
        return None
