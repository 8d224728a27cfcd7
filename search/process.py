"""How a process of hpsearch starts and ends: signals, graceful shutdown, exit codes and one-line errors."""

from __future__ import annotations

import contextlib
import functools
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
from typing import Any, Protocol

from hpsearch.search.errors import USER_ERRORS
from hpsearch.storage.errors import AwayError
from hpsearch.storage.urls import redact


def leave_when_told() -> None:
    """Let SIGTERM end this process from now on, whatever it is at; a thread beside the main one changes nothing."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, _frame: object) -> None:
    os._exit(128 + number)  # by an exception it might be caught


# What an engine may start again by: 1 and 143, never 0, 2 or 3.
EXIT_DONE = 0  # of a worker: nothing is left to do, or the study is stopped
EXIT_AWAY = 1  # a service does not answer, or an error of ours: it may be tried again
EXIT_USER_ERROR = 2  # a setting is wrong: one line says which
EXIT_GAVE_UP = 3  # of a worker: the objective fails every trial
EXIT_INTERRUPTED = 128 + 2  # by Ctrl-C
EXIT_DRAINED = 128 + 15  # of a worker: it was told to go, and there is work left


def find_modules_here() -> None:
    """Look for `pkg.module:Class` and my_objective.py where the command is run, too, as `python -m` does."""
    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109 sys.path holds strings
        sys.path.append(here)


def telling_mistakes(work: Callable[[], int]) -> int:
    """Do the work and return its exit code; a mistake of the user is told in one line, and so is a service
    that is away. All else is ours, and raised."""
    try:
        return work()
    except USER_ERRORS as error:
        print(f"hpsearch: {error}", file=sys.stderr, flush=True)  # noqa: T201 it is for the user
        return EXIT_AWAY if isinstance(error, AwayError) else EXIT_USER_ERROR
    except Exception as error:  # whatever the driver of a database raises
        from hpsearch.storage.database.retry import is_transient

        if not is_transient(error):
            raise
        said = redact(" ".join(str(getattr(error, "orig", error)).split()))
        print(f"hpsearch: the database does not answer: {said}", file=sys.stderr, flush=True)  # noqa: T201 as above
        return EXIT_AWAY


@contextmanager
def handling(numbers: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle signals so for a while; a thread beside a program's main one gets none, and leaves them as they are.

    What this process forks meanwhile inherits the handler, and is told nothing by it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    own = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() == own:
            handler(number, frame)

    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, kept in before.items():
            signal.signal(number, kept)


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


def stop_on_signals() -> Stop:
    """Return what SIGTERM and SIGINT set; in a thread beside a program's main one nothing does.

    SIGTERM may come again: engines signal every process of a job, and scripts pass it on besides. A second SIGINT is a
    person's, and ends the process at once.
    """
    stop, own = Stop(), os.getpid()
    if threading.current_thread() is not threading.main_thread():
        return stop
    told: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != own:  # forked during a trial
            return
        again = bool(told)  # asked first: another may come between any two of these lines, and sees what is told
        told.append(number)
        if told.count(signal.SIGINT) > 1:
            os._exit(EXIT_INTERRUPTED)
        if again:
            return
        stop.set()
        # Not by the log: what it writes may be interrupted by this very signal.
        with contextlib.suppress(OSError):
            os.write(2, f"{signal.Signals(number).name}: ending the epoch, or saving within it, then going\n".encode())

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    shield_children()
    return stop


def watch_fleet(pid: int) -> Callable[[], bool]:
    """Return what tells whether the fleet that started this process has ended, or what it was forked from.

    Args:
        pid: the fleet's process id.
    """
    fleet, parent = multiprocessing.parent_process(), os.getppid()
    if fleet is not None and fleet.pid == pid:
        return lambda: not fleet.is_alive() or os.getppid() != parent
    return lambda: os.getppid() != pid
