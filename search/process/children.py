"""Functions that shield, bind and kill the child processes of hpsearch processes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import popen_fork
from typing import TYPE_CHECKING, Any

from hpsearch.search.process.exits import EXIT_DONE

if TYPE_CHECKING:
    import psutil

_PR_SET_CHILD_SUBREAPER = 36


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


@contextlib.contextmanager
def adopt_orphans() -> Iterator[None]:
    """Make this process the parent of descendants whose parents end, so that `end_session` finds them (on Linux)."""

    def set_subreaper(value: int) -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, value)

    set_subreaper(1)
    try:
        yield
    finally:
        set_subreaper(0)


def end_session() -> list[int]:
    """Kill the processes that code of the objective left in this worker's session, and return their PIDs.

    A worker that was started in a shell is in the session of the shell. Then only its descendants are killed. Services
    are in sessions of their own.
    """
    import psutil

    own, session = os.getpid(), os.getsid(0)
    if session == own:
        return kill_session(own)
    return _kill_in_session(psutil.Process(own).children(recursive=True), session)


def end_started_programs() -> None:
    """Kill the programs that an objective's code has started in this process, if it may have been imported."""
    if "torch" in sys.modules:
        end_session()


def kill_descendants(pid: int) -> None:
    """Kill the descendants of a process."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error, OSError):
                if not _is_resource_tracker(process):
                    process.kill()


def kill_session(leader: int) -> list[int]:
    """Kill the other processes of a worker's session, also those whose parents have ended, and return their PIDs."""
    import psutil

    return _kill_in_session((process for process in psutil.process_iter() if process.pid != leader), leader)


def _kill_in_session(processes: Iterable[psutil.Process], session: int) -> list[int]:
    import psutil

    left = list[int]()
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == session and not _is_resource_tracker(process):
                process.kill()
                left.append(process.pid)
    return left


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
