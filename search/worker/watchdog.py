"""The pulse of a worker: a file for probes, and a watchdog that ends a process which gets on no more."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hpsearch.search.process import EXIT_AWAY

log = logging.getLogger(__name__)

LEAST = 60.0  # seconds below which no pause is too long: a machine may be busy with something else
_TOUCHED = 1.0  # seconds between two touches of the file


class Pulse:
    """Beats with each sign that the worker gets on: a step, a report, a look for work.

    Before the first step of an attempt nothing is judged: nobody knows how long data take to prepare.

    Args:
        heartbeat: a file that is touched then, at most each second.
        stall: how many times the longest pause of the attempt so far makes one too long; None looks after nothing.
    """

    def __init__(self, heartbeat: Path | None = None, *, stall: float | None = None) -> None:
        self._file, self._stall = heartbeat, stall
        self._touched_at = -_TOUCHED
        self._last = time.monotonic()
        self._longest = 0.0
        self._beats = 0
        self._give_back: Callable[[], None] | None = None
        self._watch: threading.Thread | None = None
        if heartbeat is not None:
            heartbeat.parent.mkdir(parents=True, exist_ok=True)

    def beat(self) -> None:
        """Take note of a sign of life."""
        now = time.monotonic()
        if self._beats:  # what comes before the first step, such as compiling, is no measure
            self._longest = max(self._longest, now - self._last)
        self._beats += 1
        self._last = now
        if self._file is not None and now - self._touched_at >= _TOUCHED:
            self._touched_at = now
            self._file.touch()

    def attempt(self, give_back: Callable[[], None]) -> None:
        """Begin to look after an attempt; `give_back` leaves its trial to others."""
        self._beats, self._longest, self._last = 0, 0.0, time.monotonic()
        self._give_back = give_back
        if self._stall is not None and self._watch is None:
            self._watch = threading.Thread(target=self._look, name="stall", daemon=True)
            self._watch.start()

    def rest(self) -> None:
        """The attempt is over."""
        self._give_back = None

    def _look(self) -> None:
        assert self._stall is not None
        while True:
            time.sleep(min(1.0, LEAST / 4))  # it looks for what does not come: nothing could wake it
            give_back, pause = self._give_back, time.monotonic() - self._last
            if give_back is None or not self._beats or pause <= max(LEAST, self._stall * self._longest):
                continue
            log.error(
                "no step for %.0f s, where the longest pause was %.3g s: the trial is given back, and this worker ends",
                *(pause, self._longest),
            )
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            try:
                give_back()
            finally:
                os._exit(EXIT_AWAY)
