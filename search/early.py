"""SIGTERM while a command holds nothing yet: it leaves at once.

As PID 1 of a container a process hears only what it has a handler for, so that one stands before anything large is
loaded: this imports nothing of the project.
"""

from __future__ import annotations

import os
import signal
import threading


def leave_when_told() -> None:
    """Let SIGTERM end this process from now on, whatever it is at; a thread beside the main one changes nothing."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, _frame: object) -> None:
    os._exit(128 + number)  # by an exception it might be caught
