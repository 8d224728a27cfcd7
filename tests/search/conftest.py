"""Verbs that run within the tests' own process leave it as it was."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    """A worker sets up the process's logging, to a stream that pytest closes after the test, and its signals."""
    root, numbers = logging.getLogger(), (signal.SIGINT, signal.SIGTERM)
    handlers, level, signals = root.handlers[:], root.level, [signal.getsignal(number) for number in numbers]
    yield
    root.handlers[:] = [*handlers, *(h for h in root.handlers if h not in handlers and _is_pytests(h))]
    root.setLevel(level)
    for number, handler in zip(numbers, signals, strict=True):
        signal.signal(number, handler)


def _is_pytests(handler: logging.Handler) -> bool:
    return type(handler).__module__.startswith("_pytest")
