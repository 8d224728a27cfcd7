"""When a worker leaves: it was told to, or its time is up; and until when it may stay then."""

from __future__ import annotations

import os
import time
from typing import Protocol


class Told(Protocol):
    """What tells a worker to go, such as a `threading.Event`."""

    def is_set(self) -> bool:
        """Whether it does."""
        ...


class Stop:
    """Whether a process is told to go, and since when. No lock: a signal's handler would wait for it."""

    def __init__(self) -> None:
        self.since: float | None = None

    def set(self) -> None:
        """Tell it to go."""
        if self.since is None:
            self.since = time.monotonic()

    def is_set(self) -> bool:
        """Whether it is told to."""
        return self.since is not None


class Leaving:
    """Whether a worker is to leave, and how long it may take.

    Args:
        told: sets it off.
        grace: seconds from there to the kill.
        max_time: seconds from now after which it is set off by itself.
    """

    def __init__(self, told: Told, *, grace: float, max_time: float | None = None) -> None:
        self._told, self._grace = told, grace
        self._until = None if max_time is None else time.monotonic() + max_time
        self._since: float | None = None
        self._job_end = _job_end()

    def begin(self) -> None:
        """Leave from now on."""
        if self._since is None:
            self._since = time.monotonic()

    @property
    def begun(self) -> bool:
        """Whether it is to leave."""
        if self._since is None:
            if self._told.is_set():
                self._since = getattr(self._told, "since", None) or time.monotonic()
            elif self._until is not None and time.monotonic() >= self._until:
                self._since = time.monotonic()
        return self._since is not None

    def left(self) -> float:
        """Seconds to the kill, once it is to leave."""
        since = time.monotonic() if self._since is None else self._since
        grace = since + self._grace - time.monotonic()
        return grace if self._job_end is None else min(grace, self._job_end - time.time())


def _job_end() -> float | None:
    """When Slurm ends this job, in unix seconds, where it says so."""
    try:
        return float(os.environ["SLURM_JOB_END_TIME"])
    except (KeyError, ValueError):
        return None
