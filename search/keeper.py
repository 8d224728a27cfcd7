"""Keeping the embedded services up while a search runs on them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from storage import stack
from storage.errors import StorageError

_EVERY = 5.0  # seconds; a look costs about 30 ms


@contextmanager
def kept_up(home: Path) -> Iterator[None]:
    """Start services again that end by themselves; those stopped by ``hpsearch down`` stay down."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_EVERY):
            try:
                if any(service.state == "dead" for service in stack.status(home)):
                    stack.up(home)
            except StorageError:
                continue  # it may be mended at the next look; the workers tell what they miss

    thread = threading.Thread(target=watch, name="keeper", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
