"""A process that a training forks ends with it, however that ends."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def ending_with_parent() -> Callable[[], None]:
    """Return what a process of `multiprocessing` that this one forks calls, for the kernel to kill it with its parent.

    On Linux, and for a child of the main thread: the kernel takes the end of the thread that forked for the process's.
    Torch's own loaders look every five seconds whether their parent lives, but not while they load.
    """
    main = threading.main_thread().ident

    def bind() -> None:
        parent = multiprocessing.parent_process()
        if sys.platform != "linux" or threading.get_ident() != main or parent is None:
            return
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent.pid:  # it ended before
            os.kill(os.getpid(), signal.SIGKILL)

    return bind
