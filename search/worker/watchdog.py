"""Watchdog of a worker: a heartbeat file for probes, and a thread that ends a process without progress."""

from __future__ import annotations

import errno
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hpsearch.search.errors import SearchError
from hpsearch.search.process.exits import EXIT_UNAVAILABLE
from hpsearch.storage.replacement import open_parent

log = logging.getLogger(__name__)

MIN_PAUSE_SECONDS = 60.0  # a shorter pause is not a stall, because the machine may be busy
_TOUCH_INTERVAL_SECONDS = 1.0  # between two touches of the heartbeat file


class Watchdog:
    """Monitor of a worker's progress: steps, reports and claims.

    The pause before the first step of an attempt is ignored, because preparing data may take a long time.

    Args:
        heartbeat: file to touch on progress, at most once per second. None creates no file.
        stall_factor: the worker is considered stalled if there is no progress for this multiple of the attempt's
            longest pause. None disables the check.
        end_timeout: seconds that a step of the end of a trial, such as the export of its model, may take.

    Raises:
        SearchError: the heartbeat file is a folder, or a folder of it cannot be created or is a link of another user.
    """

    def __init__(self, heartbeat: Path | None, *, stall_factor: float | None, end_timeout: float) -> None:
        self._file, self._stall_factor, self._end_timeout = heartbeat, stall_factor, end_timeout
        self._has_warned = False
        self._touched_at = -_TOUCH_INTERVAL_SECONDS
        self._last = time.monotonic()
        self._longest = 0.0
        self._beats = 0
        self._release: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None
        self._limited: tuple[str, float] | None = None  # a step with a limit of time, and its end
        if heartbeat is not None:
            try:
                with suppress(FileNotFoundError), open_parent(heartbeat):
                    pass
                heartbeat.parent.mkdir(parents=True, exist_ok=True)
                if heartbeat.is_dir():
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            except OSError as error:
                raise SearchError(
                    f"--heartbeat {str(heartbeat)!r}: {error.strerror or error}; give another file"
                ) from None

    def beat(self) -> None:
        """Record that the worker has made progress."""
        now = time.monotonic()
        if self._beats:  # the pause before the first step, such as compiling, does not count
            self._longest = max(self._longest, now - self._last)
        self._beats += 1
        self._last = now
        if self._file is not None and now - self._touched_at >= _TOUCH_INTERVAL_SECONDS:
            self._touched_at = now
            self._touch(self._file)

    def _touch(self, file: Path) -> None:
        """Set the times of a file to now, and create it if it is missing; links of other users are not followed."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            with open_parent(file) as (folder, name):
                descriptor = os.open(name, flags, 0o666, dir_fd=folder)
            try:
                os.utime(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:  # it must not end the trial
            if not self._has_warned:
                log.warning("the heartbeat cannot be written: %s", error)
            self._has_warned = True

    def watch(self, release: Callable[[], None]) -> None:
        """Start monitoring an attempt.

        Args:
            release: function that makes the attempt's trial available to other workers.
        """
        self._beats, self._longest, self._last = 0, 0.0, time.monotonic()
        self._release = release
        self._start()

    def stop_watching(self) -> None:
        """Stop monitoring the attempt."""
        self._release = None

    @contextmanager
    def limit(self, step: str) -> Iterator[None]:
        """End this process, and release the trial, if a step of the end of a trial exceeds `end_timeout`."""
        self._start()
        self._limited = step, time.monotonic() + self._end_timeout
        try:
            yield
        finally:
            self._limited = None

    def watch_fleet(self, is_gone: Callable[[], bool], grace: float) -> None:
        """End this process if it still runs `grace` seconds after the end of the fleet that started it."""

        def run() -> None:
            while not is_gone():
                time.sleep(1.0)  # polls, because the end of a parent wakes no thread
            time.sleep(grace)
            self.exit(f"the hpsearch process that started this worker has ended, and no step ended within {grace:g} s")

        threading.Thread(target=run, name="fleet", daemon=True).start()

    def _start(self) -> None:
        """Start the thread, once, because without free memory the start of a thread may never return."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(min(1.0, MIN_PAUSE_SECONDS / 4))  # polls, because a missing step cannot wake the thread
            if (reason := self._find_hang()) is not None:
                faulthandler.dump_traceback(sys.stderr, all_threads=True)
                self.exit(reason)

    def _find_hang(self) -> str | None:
        if (limited := self._limited) is not None and time.monotonic() > limited[1]:
            return f"{limited[0]} has not ended after {self._end_timeout:g} s (--barrier-timeout)"
        release, pause = self._release, time.monotonic() - self._last
        if self._stall_factor is None or release is None or not self._beats:
            return None
        if pause <= max(MIN_PAUSE_SECONDS, self._stall_factor * self._longest):
            return None
        return f"no training step for {pause:.0f} s (longest pause before: {self._longest:.3g} s)"

    def exit(self, reason: str) -> None:
        """Release the trial of the monitored attempt, if there is one, and end this process, which may hang."""
        log.error("%s; releasing the trial and exiting", reason)
        try:
            if (release := self._release) is not None:
                release()
        finally:
            os._exit(EXIT_UNAVAILABLE)
