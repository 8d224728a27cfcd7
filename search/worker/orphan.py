"""Whether a worker is left alone: the fleet that started it has ended."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable


def watch_fleet(pid: int) -> Callable[[], bool]:
    """Return what tells whether the fleet that started this process has ended, or what it was forked from.

    Args:
        pid: the fleet's process id.
    """
    fleet, parent = multiprocessing.parent_process(), os.getppid()
    if fleet is not None and fleet.pid == pid:
        return lambda: not fleet.is_alive() or os.getppid() != parent
    return lambda: os.getppid() != pid
