"""The signals of a worker: it ends its epoch, saves, and leaves its trial to the others."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType

log = logging.getLogger(__name__)


def stop_on_signals() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set; the second signal of a kind ends the process at once."""
    stop = threading.Event()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        log.info("%s: ending the epoch, then going", signal.Signals(number).name)
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return stop
