"""Unique names of processes, and the check whether a process of this machine has ended.

The death of a worker on the same machine is detected immediately. The death of a worker on another machine is detected
when its lease expires.

A name consists of the boot id of the machine, the ids of the pid namespace and the time namespace (a container has
its own namespaces), the process id and the start time. No two processes have the same name. If the /proc of a container
shows the processes of another pid namespace, processes cannot be checked, so that dead workers are only detected when
their leases expire.
"""

from __future__ import annotations

import functools
import os
import platform
import re
from pathlib import Path

import psutil

_PROC = Path("/proc")
_UNKNOWN = "unknown"  # start time of a process that /proc does not show


def get_process_name() -> str:
    """Return the name of this process."""
    return make_process_name(os.getpid())


@functools.cache
def get_machine_prefix() -> str:
    """Return the common prefix of the names of all processes that this process can check."""
    if platform.system() == "Linux":
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return "/".join([boot, *(str(_find_namespace(name)) for name in ("pid", "time"))])
    return f"{platform.node()}/{psutil.boot_time():.0f}"


def make_process_name(pid: int) -> str:
    """Return the name of a process of this machine, given its process id in this namespace."""
    return f"{get_machine_prefix()}/{pid}/{_get_start(pid)}"


def has_ended(process: str) -> bool:
    """Return whether a process, given by its name, has ended; False if this process cannot check it."""
    if not process.startswith(f"{get_machine_prefix()}/") or not _is_in_own_proc():
        return False
    # Workers write their names to the database themselves, so a name may be invalid.
    found = re.fullmatch("([0-9]{1,9})/(.+)", process.removeprefix(f"{get_machine_prefix()}/"))
    if found is None or found[2] == _UNKNOWN:
        return False
    pid, now = int(found[1]), _get_start(int(found[1]))
    return now != found[2] and not (now == "" and _is_hidden(pid))


def _is_hidden(pid: int) -> bool:
    """Return whether the process id belongs to a process of another user that the /proc option `hidepid` hides."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return False


def _find_namespace(name: str) -> Path | None:
    try:
        return (_PROC / "self/ns" / name).readlink()
    except OSError:  # an old kernel, or a sandbox
        return None


@functools.cache
def _is_in_own_proc() -> bool:
    """Return whether /proc shows the processes of the pid namespace of this process."""
    if platform.system() != "Linux":
        return True
    try:
        return int((_PROC / "self").readlink().name) == os.getpid()
    except (OSError, ValueError):
        return False


def _get_start(pid: int) -> str:
    """Return the start time of a process as text; an empty text if the process has ended or is a zombie."""
    if not _is_in_own_proc():
        return _UNKNOWN
    try:
        if platform.system() == "Linux":
            # The program name, in parentheses, may contain spaces. Ticks since boot do not depend on the clock.
            fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
            return "" if fields[0] in "ZX" else fields[19]
        process = psutil.Process(pid)
        return "" if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.0f}"
    except (OSError, psutil.Error):
        return ""
