"""Keeping the embedded services up while a search runs on them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpsearch.storage.embedded import stack
from hpsearch.storage.errors import StorageError

_EVERY = 5.0  # seconds; a look costs about 30 ms


@contextmanager
def kept_up(home: Path) -> Iterator[threading.Event]:
    """Start services again that end by themselves; yield an event that is set when ``hpsearch down`` stopped them."""
    done, stopped = threading.Event(), threading.Event()

    def watch() -> None:
        while not done.wait(_EVERY):
            try:
                states = {service.state for service in stack.status(home)}
                if states == {"stopped"}:
                    stopped.set()
                elif "dead" in states:
                    stack.up(home)
            except StorageError:
                continue  # it may be mended at the next look; the workers tell what they miss

    thread = threading.Thread(target=watch, name="keeper", daemon=True)
    thread.start()
    try:
        yield stopped
    finally:
        done.set()
        thread.join()
