"""Start and end of hpsearch processes: signals, graceful shutdown and exit codes."""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from multiprocessing import popen_fork
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from hpsearch.objectives.private_folders import remove_temporary_folders

if TYPE_CHECKING:
    import psutil

# Engines restart workers after exit codes 1 and 143, never after 0, 2 or 3.
EXIT_DONE = 0  # worker: the budget is spent, or the study is stopped
EXIT_UNAVAILABLE = 1  # a service is unavailable, or an internal error: a retry may succeed
EXIT_USER_ERROR = 2  # a setting is wrong
EXIT_GAVE_UP = 3  # worker: every trial fails, or the last ones fail with the same error
EXIT_INTERRUPTED = 128 + 2  # Ctrl-C
EXIT_DRAINED = 128 + 15  # worker: stopped by a signal with work left

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
            with contextlib.suppress(OSError):
                os.write(2, f"{signal.Signals(number).name}: {message}\n".encode())
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
            _run_at_end()
            report_exit(128 + number)
            os._exit(128 + number)  # user code could catch an exception

    if threading.current_thread() is threading.main_thread():
        for number in numbers or (signal.SIGTERM,):
            signal.signal(number, on_signal)


def clean_up_on_hangup() -> None:
    """Let SIGHUP, which the end of a terminal sends, first clean up as at the end of this process."""

    def on_signal(number: int, _frame: FrameType | None) -> None:
        _run_at_end()
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


@functools.cache  # the patches must be applied once
def shield_children() -> None:
    """Shield processes that this process forks later from SIGTERM and SIGINT; they end when this process ends.

    This includes processes that code of the objective makes with `os.fork`, except from other threads. Forked
    processes inherit the worker's signal handlers, which have no effect in them; exec restores the default handlers.
    This function replaces the handler that torch installs in data loader processes. Pools and data loaders end their
    processes with `terminate`. Because the processes ignore SIGTERM, `terminate` sends SIGKILL instead.
    """
    from torch.utils.data._utils import signal_handling

    torch_signals: Any = signal_handling  # the module is not typed
    handle_faults = torch_signals._set_worker_signal_handlers

    def set_loader_signals() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        handle_faults()
        signal.signal(signal.SIGTERM, _ignore_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

    torch_signals._set_worker_signal_handlers = set_loader_signals
    popen_fork.Popen.terminate = popen_fork.Popen.kill  # type: ignore[method-assign]  # SIGTERM is shielded
    bind_children()


def bind_children() -> None:
    """Let the processes that the main thread of this process forks later end with it.

    This includes processes that code of the objective makes with `os.fork`.
    """
    from hpsearch.objectives.training.data.loader import kill_with_parent

    own, main_thread = os.getpid(), threading.main_thread().ident

    def bind() -> None:  # the kernel would kill the process when the forking thread ends
        if sys.platform == "linux" and os.getppid() == own and threading.get_ident() == main_thread:
            kill_with_parent(own)

    os.register_at_fork(after_in_child=bind)


def _ignore_signal(*_: object) -> None:
    """Ignore a signal. Unlike SIG_IGN, this handler is not inherited by a program that the process executes."""


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


EXIT_FILE_VARIABLE = "HPSEARCH_EXIT_FILE"  # file to which a worker of a fleet writes its exit code
_EXIT_SECONDS = 5.0
_exit_files: dict[int, Path] = {}  # by process id, because code of the objective may fork this process


def take_exit_file(environment: MutableMapping[str, str]) -> None:
    """Remove the name of the worker's exit file from an environment, so that user code does not get it; keep it."""
    if (name := environment.pop(EXIT_FILE_VARIABLE, None)) is not None:
        _exit_files[os.getpid()] = Path(name)


def report_exit(code: int) -> None:
    """Write the exit code of this worker to its exit file, if it has one.

    Without the file, the fleet does not take the code of a process for the worker's own, because code of the objective
    can call `os._exit`.
    """
    if (exit_file := _exit_files.get(os.getpid())) is not None:
        with contextlib.suppress(OSError):
            exit_file.write_text(str(code))


def prepare_exit(code: int) -> None:
    """Report the exit code, and limit the time until this process has exited.

    Threads and processes of user code could prevent the exit.
    """
    report_exit(code)
    with contextlib.suppress(RuntimeError):  # the limit of threads is reached
        start_new_thread(_end_process, (code,))  # Thread.start waits forever for a thread that gets no memory


def call_at_end(function: Callable[[], object]) -> None:
    """Call a function when this process ends, also by a signal, or if threads of user code prevent a normal exit."""
    atexit.register(function)
    _at_end.append((os.getpid(), function))


_at_end: list[tuple[int, Callable[[], object]]] = []  # with the process, whose copies must not call the functions


def _run_at_end() -> None:
    for pid, function in _at_end:
        if pid == os.getpid():
            with contextlib.suppress(Exception):  # nothing may prevent the exit
                function()
    remove_temporary_folders()


@contextmanager
def report_foreign_exits() -> Iterator[None]:
    """Report calls of `os._exit` by other code in this block, and exit with an error code."""
    end, own = os._exit, os.getpid()

    def end_or_report(status: int) -> NoReturn:
        try:
            caller = str(sys._getframe(1).f_globals.get("__name__", ""))
        except ValueError:  # called by C code
            caller = ""
        if os.getpid() == own and not caller.startswith(("hpsearch.", "multiprocessing.", "__main__")):
            remove_temporary_folders()
            fault = f"hpsearch: {caller} has ended the process with os._exit({status}); remove the call\n"
            with contextlib.suppress(OSError):
                os.write(2, fault.encode())
            status = status or EXIT_UNAVAILABLE
        end(status)

    os._exit = end_or_report
    try:
        yield
    finally:
        os._exit = end


def _end_process(code: int) -> None:
    time.sleep(_EXIT_SECONDS)
    left = [thread.name for thread in threading.enumerate() if not thread.daemon]
    left = [f"thread {name}" for name in left if name != threading.main_thread().name]
    children = multiprocessing.active_children()
    left += [f"process {child.pid}" for child in children]
    for child in children:
        child.kill()
    _run_at_end()
    with contextlib.suppress(Exception):
        if left:
            print(f"hpsearch: ended while code of the objective was running: {', '.join(left)}", file=sys.stderr)  # noqa: T201 output
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def end_session() -> list[int]:
    """Kill the processes that code of the objective left in this worker's own session, and return their PIDs."""
    own = os.getpid()
    if os.getsid(0) != own:  # for example a worker that was started in a terminal
        return []
    return kill_descendants(own, lambda pid: os.getsid(pid) == own)


def kill_descendants(pid: int, selects: Callable[[int], bool] = lambda _: True) -> list[int]:
    """Kill the descendants of a process that `selects` accepts, and return their PIDs."""
    import psutil

    left = list[int]()
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error, OSError):
                if selects(process.pid) and not _is_resource_tracker(process):
                    process.kill()
                    left.append(process.pid)
    return left


def kill_session(leader: int) -> None:
    """Kill the processes that a worker left in its session when it was killed or crashed."""
    import psutil

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != leader and os.getsid(process.pid) == leader and not _is_resource_tracker(process):
                process.kill()


def _is_resource_tracker(process: psutil.Process) -> bool:
    """Return whether a process removes the shared memory of multiprocessing or joblib when its parent has ended."""
    return ".resource_tracker" in " ".join(process.cmdline())


def end_if_forked(pid: int) -> None:
    """End this process if it is a copy of process `pid`, which code of the objective made with `os.fork`."""
    if os.getpid() != pid:
        os._exit(EXIT_DONE)


def make_fleet_watcher(pid: int) -> Callable[[], bool]:
    """Return a function that checks whether the fleet with this PID, or the fleet's fork server, has ended."""
    fleet, parent = multiprocessing.parent_process(), os.getppid()
    if fleet is not None and fleet.pid == pid:
        sentinel = fleet.sentinel

        def has_ended() -> bool:
            # `is_alive` never returns if code of the objective has frozen `time.monotonic`. Threads cannot share a
            # poll object.
            poller = select.poll()
            poller.register(sentinel, select.POLLIN)
            return bool(poller.poll(0)) or os.getppid() != parent

        return has_ended
    return lambda: os.getppid() != pid
