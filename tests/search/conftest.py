"""Verbs leave the tests' own process as it was; and a study with runs and models on the MLflow server of the tests."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.embedded.stack import StackInfo
from storage.mlflow.client import Tracking
from storage.study_storage.opening import open_storage
from tests.search.promotion.support import Tracked, track


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


@pytest.fixture(scope="session")
def tracking(stack: StackInfo) -> Tracking:
    return Tracking(stack.tracking_uri)


@pytest.fixture
def tracked(database_url: str, tracking: Tracking, tmp_path: Path) -> Tracked:
    """Trials 0 to 2 COMPLETE, the second one the best, and trial 3 PRUNED."""
    return track(open_storage(database_url, application_name="test"), tracking, tmp_path, values=[0.5, 0.9, 0.8, None])
