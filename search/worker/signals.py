"""The signals of a worker: it ends its epoch, saves, and leaves its trial to the others."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType

from search.worker.children import shield_children


def stop_on_signals() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set; the second signal of a kind ends the process at once."""
    stop, own = threading.Event(), os.getpid()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != own:  # forked during a trial
            return
        stop.set()
        signal.signal(number, signal.SIG_DFL)
        # Not by the log: what it writes may be interrupted by this very signal.
        with contextlib.suppress(OSError):
            os.write(2, f"{signal.Signals(number).name}: ending the epoch, then going\n".encode())

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    shield_children()
    return stop
