"""Functions that shield, bind and kill the child processes of hpsearch processes."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from multiprocessing import popen_fork
from typing import TYPE_CHECKING, Any

from hpsearch.search.process.exits import EXIT_DONE

if TYPE_CHECKING:
    import psutil


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


_earlier: set[int] | None = None  # PIDs in the session when this command started; None if this process is no command
_STARTED_BY = "HPSEARCH_STARTED_BY"  # variable that the programs of an objective inherit


def remember_session() -> None:
    """Remember the other processes of this command's session, so that `end_session` spares them.

    They can be children of this process, such as `gzip` in ``hpsearch run > >(gzip)``.
    """
    global _earlier  # noqa: PLW0603 the processes are those of this process
    own, session = os.getpid(), os.getsid(0)
    _earlier = set()
    for pid in _list_pids():
        with contextlib.suppress(OSError):
            if pid != own and os.getsid(pid) == session:
                _earlier.add(pid)
    os.environ[_STARTED_BY] = str(own)


def _list_pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208 names
    except FileNotFoundError:  # macOS
        import psutil

        return psutil.pids()


def end_session() -> list[int]:
    """Kill the processes that code of the objective left in this process's session, and return their PIDs.

    hpsearch's services have their own sessions, so they survive.
    """
    import psutil

    own, session = os.getpid(), os.getsid(0)
    if _earlier is None:  # not a command, but a process that a command has started
        return kill_session(own) if session == own else []
    return _kill_members(session, [process for process in psutil.process_iter() if _is_started(process, own)])


def _is_started(process: psutil.Process, own: int) -> bool:
    """Return whether this command is an ancestor of a process of its session.

    Orphans are recognized by their environment or by the session or process group that this command leads. An earlier
    process can have adopted them, such as the first process of a container.
    """
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        if process.pid == own or os.getsid(process.pid) != os.getsid(0):
            return False
        ancestor = _find_known_ancestor(process, own)
        is_member = ancestor is None and own in (os.getsid(process.pid), os.getpgid(process.pid))
        return ancestor == own or is_member or process.environ().get(_STARTED_BY) == str(own)
    return False


def _find_known_ancestor(process: psutil.Process, own: int) -> int | None:
    """Return the PID of the first among a process and its ancestors that is this process or an earlier one, or None."""
    import psutil

    each: psutil.Process | None = process
    with contextlib.suppress(psutil.AccessDenied):  # /proc may hide the processes of other users
        while each is not None:
            if each.pid == own or each.pid in (_earlier or ()):
                return each.pid
            each = each.parent()
    return None


def end_started_programs() -> None:
    """Kill the programs that an objective's code has started; without torch, no objective was imported."""
    if "torch" in sys.modules:
        end_session()


def kill_session(leader: int) -> list[int]:
    """Kill the other processes of a worker's session, also those whose parents have ended, and return their PIDs."""
    import psutil

    return _kill_members(leader, (process for process in psutil.process_iter() if process.pid != leader))


def _kill_members(session: int, processes: Iterable[psutil.Process]) -> list[int]:
    """Kill those of the processes that belong to a session, except trackers of resources; return their PIDs."""
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
