"""A process ends in a limited time."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from hpsearch.search.process import exits


@pytest.fixture
def _no_switches() -> Iterator[None]:
    """Let no other thread run until this one waits."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("_no_switches")
def test_the_thread_that_limits_the_exit_runs_before_the_interpreter_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter frees the states of other threads when it ends, and one that begins to run then crashes."""
    ended: list[int] = []
    monkeypatch.setattr(exits, "_end_process", ended.append)
    exits.prepare_exit(3)
    assert ended == [3]
