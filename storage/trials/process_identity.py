"""Whether a worker of this machine still runs: known at once, where a worker of another machine is known by its lease.

A process is named by the machine's boot, its namespaces of process ids and of time (a container has its own), its id
and its start: the name is never given twice, and says who can look. A container that was given another's /proc looks at
other processes there: it judges nobody, and is judged by its lease alone.
"""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

import psutil

_PROC = Path("/proc")
_UNKNOWN = "unknown"  # a start that cannot be seen


def current_process() -> str:
    """Return the name of this process."""
    return process_name(os.getpid())


def current_machine() -> str:
    """Return what the names of all processes begin with that this one can judge."""
    return _machine()


def process_name(pid: int) -> str:
    """Return the name of a process of this machine, as seen from here."""
    return f"{_machine()}/{pid}/{_start(pid)}"


def has_ended(process: str) -> bool:
    """Whether the process of that name has surely ended; False where this machine cannot tell."""
    machine, pid, start = process.rsplit("/", 2)
    if machine != _machine() or start == _UNKNOWN or not _sees_itself():
        return False
    now = _start(int(pid))
    return now != start and not (now == "" and _is_hidden(int(pid)))


def _is_hidden(pid: int) -> bool:
    """Whether there is such a process, of another user's, which /proc does not show (its option hidepid)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return False


@functools.cache
def _machine() -> str:
    if platform.system() == "Linux":
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return "/".join([boot, *(str(_namespace(name)) for name in ("pid", "time"))])
    return f"{platform.node()}/{psutil.boot_time():.0f}"


def _namespace(name: str) -> Path | None:
    try:
        return (_PROC / "self/ns" / name).readlink()
    except OSError:  # a kernel without it, or a sandbox
        return None


@functools.cache
def _sees_itself() -> bool:
    """Whether /proc shows the processes of this one's namespace."""
    if platform.system() != "Linux":
        return True
    try:
        return int((_PROC / "self").readlink().name) == os.getpid()
    except (OSError, ValueError):
        return False


def _start(pid: int) -> str:
    """When the process was started; nothing if it has ended, though its parent may not have looked yet."""
    if not _sees_itself():
        return _UNKNOWN
    try:
        if platform.system() == "Linux":
            # The name of the program, in parentheses, may hold spaces. Ticks since the boot do not move with the clock.
            fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
            return "" if fields[0] in "ZX" else fields[19]
        process = psutil.Process(pid)
        return "" if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.0f}"
    except (OSError, psutil.Error):
        return ""
