"""Until when a worker may stay that is told to go."""

from __future__ import annotations

import threading
import time

import pytest

from hpsearch.search.process import Leaving, Stop


def test_its_grace_counts_from_the_signal() -> None:
    stop = Stop()
    leaving = Leaving(stop, grace=100.0)
    assert not leaving.begun
    stop.set()
    assert stop.since is not None
    stop.since -= 40.0  # it came 40 s before anybody asked
    assert leaving.begun
    assert leaving.left() == pytest.approx(60.0, abs=5.0)


def test_an_event_of_a_program_counts_from_where_it_is_seen() -> None:
    leaving = Leaving(event := threading.Event(), grace=100.0)
    assert not leaving.begun
    event.set()
    assert leaving.begun
    assert leaving.left() == pytest.approx(100.0, abs=5.0)


def test_its_time_may_be_up() -> None:
    assert Leaving(Stop(), grace=1.0, max_time=0.0).begun
    leaving = Leaving(Stop(), grace=1.0, max_time=1000.0)
    assert not leaving.begun
    leaving.begin()
    assert leaving.begun


@pytest.mark.parametrize(("end", "left"), [("+10", 10.0), ("+1000", 100.0), ("", 100.0), ("soon", 100.0)])
def test_slurm_says_when_the_job_ends(monkeypatch: pytest.MonkeyPatch, end: str, left: float) -> None:
    """Where a time limit is nearer than the grace, it counts."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", f"{time.time() + float(end):.0f}" if end.startswith("+") else end)
    leaving = Leaving(Stop(), grace=100.0)
    leaving.begin()
    assert leaving.left() == pytest.approx(left, abs=5.0)
