"""Restore the process state after commands, and create a study with runs and models on the MLflow server."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpsearch.storage.embedded.stack import StackInfo
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.study_storage.storage import open_storage
from tests.search.promotion.support import Left, Tracked, leave, track, unregister


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    """Restore logging and signal handlers, which a worker sets; its log stream is closed by pytest after the test."""
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


# Trials 0 to 2 COMPLETE, the second one the best, and trial 3 PRUNED.
_VALUES = [0.5, 0.9, 0.8, None]


@pytest.fixture(scope="session")
def _left(tracking: Tracking, tmp_path_factory: pytest.TempPathFactory) -> Left:
    return leave(tracking, tmp_path_factory.mktemp("left"), values=_VALUES)


@pytest.fixture
def tracked(database_url: str, tracking: Tracking, _left: Left) -> Iterator[Tracked]:
    """Return three COMPLETE trials, the second one the best, and a PRUNED one. All tests share their runs and models.

    Registered models are removed after the test. Changes of the runs and models themselves are not undone.
    """
    yield track(open_storage(database_url, application_name="test"), tracking, _left)
    unregister(tracking, _left)


@pytest.fixture
def own_tracked(database_url: str, tracking: Tracking, tmp_path: Path) -> Tracked:
    """Return the same with separate runs and models, which the test can remove."""
    left = leave(tracking, tmp_path, values=_VALUES)
    return track(open_storage(database_url, application_name="test"), tracking, left)
