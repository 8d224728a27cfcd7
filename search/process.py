"""How a process of hpsearch starts and ends: signals, graceful shutdown, exit codes and one-line errors."""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import popen_fork, util
from types import FrameType
from typing import Any

from hpsearch.search.errors import USER_ERRORS
from hpsearch.storage.errors import AwayError, one_line
from hpsearch.storage.urls import redact

# What an engine may start again by: 1 and 143, never 0, 2 or 3.
EXIT_DONE = 0  # of a worker: nothing is left to do, or the study is stopped
EXIT_AWAY = 1  # a service does not answer, or an error of ours: it may be tried again
EXIT_USER_ERROR = 2  # a setting is wrong: one line says which
EXIT_GAVE_UP = 3  # of a worker: the objective fails every trial
EXIT_INTERRUPTED = 128 + 2  # by Ctrl-C
EXIT_DRAINED = 128 + 15  # of a worker: it was told to go, and there is work left


def add_working_folder_to_path() -> None:
    """Make `pkg.module:Class` and my_objective.py importable from the working folder, as `python -m` does."""
    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109 sys.path holds strings
        sys.path.append(here)


def report_errors(work: Callable[[], int]) -> int:
    """Run `work` and return its exit code; a user's error or an unavailable service is one line on stderr."""
    try:
        return work()
    except USER_ERRORS as error:
        print(f"hpsearch: {error}", file=sys.stderr, flush=True)  # noqa: T201 it is for the user
        return EXIT_AWAY if isinstance(error, AwayError) else EXIT_USER_ERROR
    except Exception as error:  # whatever the driver of a database raises
        from hpsearch.storage.database.retry import is_transient

        if not is_transient(error):
            raise
        said = redact(one_line(error))
        print(f"hpsearch: the database does not answer: {said}", file=sys.stderr, flush=True)  # noqa: T201 as above
        return EXIT_AWAY


class StopEvent:
    """A stop request, with its time. Unlike `threading.Event` it has no lock, for which a signal handler would wait."""

    def __init__(self) -> None:
        self.since: float | None = None

    def set(self) -> None:
        """Request the stop."""
        if self.since is None:
            self.since = time.monotonic()

    def is_set(self) -> bool:
        """Whether the stop is requested."""
        return self.since is not None


def raise_interrupt() -> None:
    """Raise KeyboardInterrupt."""
    raise KeyboardInterrupt


def stop_on_signals(
    *numbers: signal.Signals,
    kill: Callable[[], object] = lambda: os._exit(EXIT_INTERRUPTED),
    request: Callable[[], object] = lambda: None,
    message: str = "",
) -> StopEvent:
    """Return an event that signals set; outside the main thread none does.

    Signals may repeat: engines signal every process of a job, and scripts pass signals on. Only a second SIGINT, which
    is a second Ctrl-C of a person, ends the process at once.

    Args:
        numbers: SIGTERM and SIGINT if empty.
        kill: called at the second SIGINT and each later one.
        request: called at each other signal.
        message: written to stderr at the first signal.
    """
    stop, own, received = StopEvent(), os.getpid(), list[int]()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != own:  # a forked process inherits the handler
            return
        first = not received  # read first: another signal may interrupt between any two of these lines
        received.append(number)
        stop.set()
        if first and message:  # not by the log: the signal may have interrupted it
            with contextlib.suppress(OSError):
                os.write(2, f"{signal.Signals(number).name}: {message}\n".encode())
        (kill if received.count(signal.SIGINT) > 1 else request)()

    if threading.current_thread() is threading.main_thread():
        for number in numbers or (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, on_signal)
    return stop


def stop_worker_on_signals() -> StopEvent:
    """Return the stop event of a worker process, whose children ignore the signals."""
    stop = stop_on_signals(message="ending the epoch, or saving within it, then going")
    if threading.current_thread() is threading.main_thread():
        shield_children()
    return stop


@contextmanager
def restore_handlers() -> Iterator[None]:
    """Restore the signal handlers of the calling program at the end; outside the main thread none can be set."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def exit_on_signals(*numbers: signal.Signals, only_forked: bool = False) -> None:
    """Let signals end this process at once; outside the main thread nothing changes.

    Args:
        numbers: SIGTERM if empty.
        only_forked: whether they end only processes that this one forks.
    """
    survivor = os.getpid() if only_forked else None

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != survivor:
            os._exit(128 + number)  # an exception might be caught

    if threading.current_thread() is threading.main_thread():
        for number in numbers or (signal.SIGTERM,):
            signal.signal(number, on_signal)


@functools.cache  # once is enough
def shield_children() -> None:
    """Let no SIGTERM or SIGINT end what this process forks from now on; it ends with this one.

    Forked processes inherit the worker's handlers, which do nothing in them; exec gives a program the defaults back.
    Torch puts a handler of its own in their place, so that is replaced. As SIGTERM is not heard, `terminate` of a
    process of `multiprocessing`, by which pools and loaders end theirs, kills.
    """
    from torch.utils.data._utils import signal_handling

    from hpsearch.objectives.training.data.loader import ending_with_parent

    torch_signals: Any = signal_handling  # it names no types
    handle_faults, bind = torch_signals._set_worker_signal_handlers, ending_with_parent()

    def begin_loader() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        handle_faults()
        signal.signal(signal.SIGTERM, _not_heard)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

    torch_signals._set_worker_signal_handlers = begin_loader
    popen_fork.Popen.terminate = popen_fork.Popen.kill  # type: ignore[method-assign]  # SIGTERM is shielded
    util.register_after_fork(shield_children, lambda _: bind())


def _not_heard(*_: object) -> None:
    """Do nothing; unlike SIG_IGN, a program that is executed does not inherit it."""


class GracefulShutdown:
    """Whether a worker has to stop, and how many seconds it has left.

    Args:
        stop: starts the shutdown.
        grace: seconds from the stop request to the kill.
        max_time: seconds from now after which the shutdown starts by itself.
    """

    def __init__(self, stop: StopEvent | threading.Event, *, grace: float, max_time: float | None = None) -> None:
        self._stop, self._grace = stop, grace
        self._until = math.inf if max_time is None else time.monotonic() + max_time
        self._since: float | None = None
        self._job_end = _job_end()

    def begin(self) -> None:
        """Start the shutdown."""
        if self._since is None:
            self._since = time.monotonic()

    @property
    def has_begun(self) -> bool:
        """Whether the worker has to stop."""
        if self._since is None and self._stop.is_set():
            self._since = getattr(self._stop, "since", None)
            self.begin()
        elif time.monotonic() >= self._until:
            self.begin()
        return self._since is not None

    def seconds_left(self) -> float:
        """Return the seconds to the kill, once the shutdown has begun."""
        since = time.monotonic() if self._since is None else self._since
        return min(since + self._grace - time.monotonic(), self._job_end - time.time())


def _job_end() -> float:
    """Return the unix time at which Slurm ends this job; infinite without a limit."""
    try:
        return float(os.environ["SLURM_JOB_END_TIME"])
    except (KeyError, ValueError):
        return math.inf


def watch_fleet(pid: int) -> Callable[[], bool]:
    """Return a function that returns whether the fleet that started this process has ended, or its fork server."""
    fleet, parent = multiprocessing.parent_process(), os.getppid()
    if fleet is not None and fleet.pid == pid:
        return lambda: not fleet.is_alive() or os.getppid() != parent
    return lambda: os.getppid() != pid
