"""Standard streams that are closed, full or not read."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import sys
from typing import TextIO

_WRITE_MILLISECONDS = 200


def open_standard_streams() -> None:
    """Make the standard streams usable by all commands.

    The null device replaces closed streams, which other files would replace otherwise, and files that were opened the
    wrong way: a shell script that starts hpsearch may itself have become a closed stream. The output shows characters
    that its encoding lacks as escapes.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if not _is_usable(descriptor):
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, descriptor)
            os.set_inheritable(descriptor, True)  # dup2 does not do this if both are equal
            if null != descriptor:
                os.close(null)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "r" if descriptor == 0 else "w", closefd=False))  # noqa: SIM115 stays open
    with contextlib.suppress(OSError):  # a pipe that was opened for appending
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # stderr has this by default


def _is_usable(descriptor: int) -> bool:
    """Return whether a standard stream is open, and for reading (stdin) or writing (others)."""
    try:
        mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
    except OSError:
        return False
    return mode != (os.O_WRONLY if descriptor == 0 else os.O_RDONLY)


def find_broken_streams() -> list[TextIO]:
    """Return which of stdout and stderr cannot be written, because their disk is full or their reader has ended."""
    return [stream for stream in (sys.stdout, sys.stderr) if stream is not None and _is_broken(stream)]


def _is_broken(stream: TextIO) -> bool:
    try:
        stream.flush()  # repeats the write that failed
    except (OSError, ValueError):
        return True
    except Exception:  # of an object of the user
        return False
    with contextlib.suppress(AttributeError, OSError, ValueError):  # an object of the user without a descriptor
        return bool(_poll(stream.fileno(), 0) & (select.POLLERR | select.POLLHUP))
    return False


def write_to_stderr(text: str) -> None:
    """Write a short line to stderr without a buffer, unless it is a full pipe, which would block this process."""
    with contextlib.suppress(OSError):
        if _poll(2, _WRITE_MILLISECONDS) & (select.POLLOUT | select.POLLNVAL):  # macOS: a device
            os.write(2, text.encode(errors="backslashreplace"))


def _poll(descriptor: int, milliseconds: int) -> int:
    """Return the events of `select.poll` at a descriptor within a time."""
    poller = select.poll()
    poller.register(descriptor, select.POLLOUT)
    return sum(event for _, event in poller.poll(milliseconds))
