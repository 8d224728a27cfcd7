"""The start of an attempt, before its training: a stop request ends the worker process at once."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hpsearch.search.process.exits import EXIT_DRAINED, report_exit

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1  # between two checks for a stop request, because a signal handler must not take a lock


class Startup:
    """Monitor of the start of attempts, in a worker process.

    Before the training there is nothing to save, and code of the objective such as a download cannot be interrupted.
    So a stop request during the start releases the trial and ends the process.

    Args:
        is_stopping: function that returns whether the worker must stop.
        on_exit: function to call before the process ends.
    """

    def __init__(self, is_stopping: Callable[[], bool], on_exit: Callable[[], None]) -> None:
        self._is_stopping, self._on_exit = is_stopping, on_exit
        self._release: Callable[[], None] | None = None
        self._lock = threading.Lock()  # the training must not begin while the trial is being released
        self._thread: threading.Thread | None = None

    @contextmanager
    def watch(self, release: Callable[[], None]) -> Iterator[None]:
        """Watch for a stop request in this context, until `end` is called.

        Args:
            release: function that makes the attempt's trial available to other workers.
        """
        self._release = release
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="startup", daemon=True)
            self._thread.start()
        try:
            yield
        finally:
            self.end()

    def end(self) -> None:
        """End the start of the attempt; its training begins."""
        with self._lock:
            self._release = None

    def _run(self) -> None:
        while True:
            time.sleep(_POLL_SECONDS)
            if self._release is not None and self._is_stopping():
                self._exit()

    def _exit(self) -> None:
        """Release the trial and end the process, unless the training has begun meanwhile."""
        with self._lock:
            if (release := self._release) is None:
                return
            log.info("stopped before the training; releasing the trial and exiting")
            try:
                release()
                self._on_exit()
            finally:
                report_exit(EXIT_DRAINED)
                os._exit(EXIT_DRAINED)
