"""Wait for a condition, with a long limit for busy machines."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 600.0  # seconds; a worker on a busy machine needs many to start


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Return once the condition is true; fail with the text `what` after PATIENCE seconds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)
