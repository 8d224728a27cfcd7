"""The deadline of a worker that shuts down."""

from __future__ import annotations

import threading
import time

import pytest

from hpsearch.search.process import GracefulShutdown, StopEvent


def test_its_grace_counts_from_the_signal() -> None:
    stop = StopEvent()
    shutdown = GracefulShutdown(stop, grace=100.0)
    assert not shutdown.has_begun
    stop.set()
    assert stop.since is not None
    stop.since -= 40.0  # it came 40 s before anybody asked
    assert shutdown.has_begun
    assert shutdown.seconds_left() == pytest.approx(60.0, abs=5.0)


def test_an_event_of_a_program_counts_from_where_it_is_seen() -> None:
    shutdown = GracefulShutdown(event := threading.Event(), grace=100.0)
    assert not shutdown.has_begun
    event.set()
    assert shutdown.has_begun
    assert shutdown.seconds_left() == pytest.approx(100.0, abs=5.0)


def test_its_time_may_be_up() -> None:
    assert GracefulShutdown(StopEvent(), grace=1.0, max_time=0.0).has_begun
    shutdown = GracefulShutdown(StopEvent(), grace=1.0, max_time=1000.0)
    assert not shutdown.has_begun
    shutdown.begin()
    assert shutdown.has_begun


@pytest.mark.parametrize(("end", "left"), [("+10", 10.0), ("+1000", 100.0), ("", 100.0), ("soon", 100.0)])
def test_slurm_says_when_the_job_ends(monkeypatch: pytest.MonkeyPatch, end: str, left: float) -> None:
    """Where a time limit is nearer than the grace, it counts."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", f"{time.time() + float(end):.0f}" if end.startswith("+") else end)
    shutdown = GracefulShutdown(StopEvent(), grace=100.0)
    shutdown.begin()
    assert shutdown.seconds_left() == pytest.approx(left, abs=5.0)
