"""Waiting for a condition, with the patience that a machine with much other work needs."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 600.0  # seconds; on a busy machine a worker needs many to start


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Return once it is true; fail, saying what was waited for, when patience is at its end."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)
