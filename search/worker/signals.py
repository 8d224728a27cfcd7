"""The signals of a worker: it ends its epoch, saves, and leaves its trial to the others."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType

from hpsearch.search.entry import EXIT_INTERRUPTED
from hpsearch.search.worker.children import shield_children
from hpsearch.search.worker.leaving import Stop


def stop_on_signals() -> Stop:
    """Return what SIGTERM and SIGINT set; in a thread beside a program's main one nothing does.

    SIGTERM may come again: engines signal every process of a job, and scripts pass it on besides. A second SIGINT is a
    person's, and ends the process at once.
    """
    stop, own = Stop(), os.getpid()
    if threading.current_thread() is not threading.main_thread():
        return stop
    told: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != own:  # forked during a trial
            return
        again = bool(told)  # asked first: another may come between any two of these lines, and sees what is told
        told.append(number)
        if told.count(signal.SIGINT) > 1:
            os._exit(EXIT_INTERRUPTED)
        if again:
            return
        stop.set()
        # Not by the log: what it writes may be interrupted by this very signal.
        with contextlib.suppress(OSError):
            os.write(2, f"{signal.Signals(number).name}: ending the epoch, or saving within it, then going\n".encode())

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    shield_children()
    return stop
