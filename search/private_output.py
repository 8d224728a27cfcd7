"""Detection of outputs that other users can read."""

from __future__ import annotations

import fcntl
import functools
import os
import re
import signal
import stat
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

# Programs that a notebook's kernel starts inherit them. Jupyter sets the first, and `hpsearch.__main__` the second.
_NOTEBOOK_VARIABLES = ("JPY_PARENT_PID", "HPSEARCH_NOTEBOOK")
_KERNEL_ARGUMENT = re.compile(  # of a command such as `python -m ipykernel_launcher -f FOLDER/kernel-ID.json`
    r"(.*/)?(\w*ipykernel(_launcher|\.kernelapp)?|\w+_kernel_launcher)(\.py)?|from ipykernel.*|"
    r"(-\S+=)?(.*/)?kernel-[^/\s]+\.json"
)
_OVERFLOW_UID = 65534  # of users who do not exist in a container, but may have started it


def find_exposure(stream: Any) -> str | None:
    """Return the reason why other users can read the output of a stream, or None if no reason is found.

    The shell opens the output, perhaps by a link of another user, before the command starts.
    """
    descriptor, status = -1, None
    with suppress(OSError, ValueError, AttributeError):  # closed, or no file
        descriptor = stream.fileno()
        status = os.fstat(descriptor)
    if status is not None and stat.S_ISREG(status.st_mode):
        return _find_exposure_of_file(descriptor, status)
    if any(map(os.environ.get, _NOTEBOOK_VARIABLES)) or _has_kernel_as_parent():
        return "the output goes to a notebook, which other users may be able to read"
    if status is None:
        return None
    if stat.S_ISFIFO(status.st_mode):
        return _find_exposure_of_pipe(status)
    if os.isatty(descriptor) and not _is_trusted(status.st_uid) and not _is_controlling_terminal(descriptor):
        return f"the terminal belongs to uid {status.st_uid}, who could read it"
    return None


@functools.cache
def _has_kernel_as_parent() -> bool:
    """Return whether a notebook's kernel has started this process.

    A kernel sends the output on a port that other users can read. VS Code starts kernels without Jupyter's variable,
    and users can set another backend of matplotlib.
    """
    import psutil

    process: psutil.Process | None = psutil.Process()
    with suppress(psutil.Error):  # /proc may hide the processes of other users
        while process is not None:
            process = process.parent()
            if process is not None and any(map(_KERNEL_ARGUMENT.fullmatch, process.cmdline())):
                return True
    return False


def _find_exposure_of_file(descriptor: int, status: os.stat_result) -> str | None:
    if status.st_uid not in (0, os.geteuid()):
        return f"the output file belongs to uid {status.st_uid}, who could read it"
    if status.st_mode & 0o077:
        return f"other users can open the output file (mode {stat.S_IMODE(status.st_mode):04o})"
    if _is_open_elsewhere(descriptor):
        return "another program, or a second redirection, has the output file open, perhaps since it was not private"
    return None


def _find_exposure_of_pipe(status: os.stat_result) -> str | None:
    is_anonymous = _is_anonymous(status)
    if not _is_trusted(status.st_uid) and not (is_anonymous and status.st_uid == _OVERFLOW_UID):
        return f"the output is a pipe of uid {status.st_uid}, who could read it"
    if not is_anonymous and status.st_mode & 0o044:
        return f"other users can open the output, a named pipe (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def _is_trusted(uid: int) -> bool:
    """Return whether a user is this one, root, or the user of sudo."""
    return uid in (0, os.geteuid()) or os.environ.get("SUDO_UID") == str(uid)


def _is_open_elsewhere(descriptor: int) -> bool:
    """Return whether a file is also open otherwise; False if the platform or the file system has no leases."""
    if threading.current_thread() is not threading.main_thread():
        return False
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # an open by another program meanwhile would end this process
    try:
        return not _can_lease(descriptor) and _has_leases(descriptor)
    except (AttributeError, OSError):  # the platform or the file system has no leases
        return False
    finally:
        signal.signal(signal.SIGIO, before)


def _can_lease(descriptor: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


def _has_leases(descriptor: int) -> bool:
    """Return whether the file system of a file grants leases; NFS refuses them as if the file was open elsewhere.

    True if this cannot be found out.
    """
    try:
        with tempfile.TemporaryFile(dir=Path(f"/proc/self/fd/{descriptor}").readlink().parent) as file:
            return _can_lease(file.fileno())
    except OSError:
        return True


def _is_anonymous(status: os.stat_result) -> bool:
    """Return whether a pipe has no name in a file system."""
    ends = os.pipe()
    try:
        return os.fstat(ends[0]).st_dev == status.st_dev
    finally:
        for end in ends:
            os.close(end)


def _is_controlling_terminal(descriptor: int) -> bool:
    """Return whether a terminal controls the session of this process; `su` does not change the terminal's owner."""
    with suppress(OSError):
        return os.tcgetpgrp(descriptor) > 0
    return False
