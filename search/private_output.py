"""Whether other users can read what this process writes to a stream."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
from contextlib import suppress
from typing import Any

_OVERFLOW_UID = 65534  # of users who do not exist in a container, but may have started it


def find_exposure(stream: Any) -> str | None:
    """Return how other users can read the output of a stream; None if they cannot, as far as it is known.

    The shell opens the output, perhaps by a link of another user, before the command starts.
    """
    try:
        descriptor = stream.fileno()
        status = os.fstat(descriptor)
    except (OSError, ValueError, AttributeError):  # closed, or no file
        return None
    is_own = status.st_uid in _list_trusted_users()
    if stat.S_ISREG(status.st_mode):
        return _find_exposure_of_file(descriptor, status)
    if stat.S_ISFIFO(status.st_mode):
        is_own = is_own or (status.st_uid == _OVERFLOW_UID and _is_anonymous(status))
        return None if is_own else f"the output is a pipe of uid {status.st_uid}, who could read it"
    if os.isatty(descriptor) and not is_own and not _is_controlling_terminal(descriptor):
        return f"the terminal belongs to uid {status.st_uid}, who could read it"
    return None


def _list_trusted_users() -> set[int]:
    """Return this user, root, and the user who has started this command with sudo."""
    caller = os.environ.get("SUDO_UID", "")
    return {0, os.geteuid(), *([int(caller)] if caller.isdecimal() else [])}


def _find_exposure_of_file(descriptor: int, status: os.stat_result) -> str | None:
    if status.st_uid not in (0, os.geteuid()):
        return f"the output file belongs to uid {status.st_uid}, who could read it"
    if status.st_mode & 0o077:
        return f"other users can open the output file (mode {stat.S_IMODE(status.st_mode):04o})"
    if _is_open_elsewhere(descriptor):
        return "another program has opened the output file, perhaps before it became private"
    return None


def _is_open_elsewhere(descriptor: int) -> bool:
    """Return whether a file is also open otherwise; False if the file system or the platform cannot tell."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # an open by another program meanwhile would end this process
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return True
    except (AttributeError, OSError):
        return False
    finally:
        signal.signal(signal.SIGIO, before)
    return False


def _is_anonymous(status: os.stat_result) -> bool:
    """Return whether a pipe has no name in a file system."""
    ends = os.pipe()
    try:
        return os.fstat(ends[0]).st_dev == status.st_dev
    finally:
        for end in ends:
            os.close(end)


def _is_controlling_terminal(descriptor: int) -> bool:
    """Return whether a terminal is the one in which this process was started, also by `su`, which keeps its owner."""
    with suppress(OSError):
        return os.tcgetpgrp(descriptor) > 0
    return False
