"""Signals of hpsearch processes, and the graceful shutdown that they start."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from hpsearch.search.process.children import shield_children
from hpsearch.search.process.exits import EXIT_INTERRUPTED, report_exit, run_at_end
from hpsearch.standard_streams import write_to_stderr

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # end a command


class StopEvent:
    """Event for a stop request, with the time of the request.

    Unlike `threading.Event`, it has no lock, because a lock could deadlock a signal handler.
    """

    def __init__(self) -> None:
        self.since: float | None = None

    def set(self) -> None:
        """Request the stop, and store the time of the first request."""
        if self.since is None:
            self.since = time.monotonic()

    def is_set(self) -> bool:
        """Return whether a stop was requested."""
        return self.since is not None


def raise_interrupt() -> None:
    """Raise KeyboardInterrupt, as an expression in callbacks."""
    raise KeyboardInterrupt


def stop_on_signals(
    *numbers: signal.Signals,
    kill: Callable[[], object] = lambda: os._exit(EXIT_INTERRUPTED),
    request: Callable[[], object] = lambda: None,
    message: str = "",
) -> StopEvent:
    """Install signal handlers that set a stop event, and return the event.

    A repeated SIGTERM has no further effect, because engines signal every process of a job, and scripts forward
    signals. A second SIGINT (Ctrl-C) calls `kill`. Outside the main thread, no handler is installed.

    Args:
        numbers: signals to handle; SIGTERM and SIGINT if empty.
        kill: called on the second SIGINT and on each signal after that.
        request: called on each signal before the second SIGINT.
        message: text written to stderr on the first signal.
    """
    stop, own_pid, received = StopEvent(), os.getpid(), list[int]()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != own_pid:  # forked processes inherit the handler
            return
        is_first = not received  # read first, because another signal may interrupt between any two of these lines
        received.append(number)
        stop.set()
        if is_first and message:  # not logged: the signal may have interrupted the logger
            write_to_stderr(f"{signal.Signals(number).name}: {message}\n")
        (kill if received.count(signal.SIGINT) > 1 else request)()

    if threading.current_thread() is threading.main_thread():
        for number in numbers or (signal.SIGTERM, signal.SIGINT):
            if not _is_ignored_by_nohup(number):
                signal.signal(number, on_signal)
    return stop


def _is_ignored_by_nohup(number: signal.Signals) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def stop_worker_on_signals() -> StopEvent:
    """Return a stop event that SIGTERM and SIGINT set, and shield the worker's child processes from these signals."""
    stop = stop_on_signals(message="finishing the epoch or saving a mid-epoch checkpoint, then exiting")
    if threading.current_thread() is threading.main_thread():
        shield_children()
    return stop


@contextmanager
def restore_handlers() -> Iterator[None]:
    """Restore the current signal handlers at the end of this block; do nothing outside the main thread."""
    before = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def exit_on_signals(*numbers: signal.Signals, only_forked: bool = False) -> None:
    """Install signal handlers that end this process at once; do nothing outside the main thread.

    Args:
        numbers: signals to handle; SIGTERM if empty.
        only_forked: whether the signals end only the processes that this process forks.
    """
    survivor = os.getpid() if only_forked else None

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != survivor:
            run_at_end()
            report_exit(128 + number)
            os._exit(128 + number)  # user code could catch an exception

    if threading.current_thread() is threading.main_thread():
        for number in numbers or (signal.SIGTERM,):
            signal.signal(number, on_signal)


def clean_up_on_hangup() -> None:
    """Let SIGHUP, which the end of a terminal sends, first clean up as at the end of this process."""

    def on_signal(number: int, _frame: FrameType | None) -> None:
        run_at_end()
        if threading.current_thread() is not threading.main_thread():  # the watchdog of `hpsearch.__main__`
            os._exit(128 + number)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    if not _is_ignored_by_nohup(signal.SIGHUP):
        signal.signal(signal.SIGHUP, on_signal)


def ignore_stop_signals() -> None:
    """Ignore SIGTERM and SIGINT in this process, which exits; do nothing outside the main thread.

    The interpreter restores the default handlers when it exits. A signal would then replace the exit code of a worker.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)


class GracefulShutdown:
    """The graceful shutdown of a worker: whether it has begun, and the seconds until the worker is killed.

    Args:
        stop: event that starts the shutdown.
        grace: seconds from the stop request to SIGKILL.
        max_time: seconds from now after which the shutdown starts without a stop request; None sets no limit.
    """

    def __init__(self, stop: StopEvent | threading.Event, *, grace: float, max_time: float | None = None) -> None:
        self._stop, self._grace = stop, grace
        self._until = math.inf if max_time is None else time.monotonic() + max_time
        self._since: float | None = None
        self._job_end = _job_end()

    def start(self) -> None:
        """Start the shutdown."""
        if self._since is None:
            self._since = time.monotonic()

    @property
    def is_shutting_down(self) -> bool:
        """Whether the graceful shutdown has begun, so that the worker has to stop."""
        if self._since is None and self._stop.is_set():
            self._since = getattr(self._stop, "since", None)
            self.start()
        elif time.monotonic() >= self._until:
            self.start()
        return self._since is not None

    def seconds_left(self) -> float:
        """Return the seconds until SIGKILL; if the shutdown has not begun, the seconds if it began now."""
        since = time.monotonic() if self._since is None else self._since
        return min(since + self._grace - time.monotonic(), self._job_end - time.time())


def _job_end() -> float:
    """Return the Unix time at which Slurm ends this job; infinity if there is no time limit."""
    try:
        return float(os.environ["SLURM_JOB_END_TIME"])
    except (KeyError, ValueError):
        return math.inf
