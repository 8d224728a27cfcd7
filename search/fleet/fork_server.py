"""Start worker processes with a fork server, which has imported their libraries."""

from __future__ import annotations

import contextlib
import errno
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.private_folders import make_socket_folder
from hpsearch.search.error_lines import report_errors
from hpsearch.search.fleet.cores_and_gpus import thread_environment
from hpsearch.search.process.exits import prepare_exit, take_exit_file
from hpsearch.search.process.signals import ignore_stop_signals

# No forks on machines with an accelerator: a process must not use the driver before a fork, but a library may use it
# when it is imported.
_ACCELERATOR_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg", "/dev/accel")

SOCKET_FOLDER_VARIABLE = (
    "HPSEARCH_SOCKET_FOLDER"  # folder that the fork server removes, because a killed fleet cannot do it
)

_context = multiprocessing.get_context("forkserver")
_start_lock = threading.Lock()  # a start changes the whole process: its environment, output and main module


def can_fork() -> bool:
    """Return whether workers can be forked on this machine. If not, each worker is a new interpreter."""
    return sys.platform == "linux" and not any(Path(device).exists() for device in _ACCELERATOR_DEVICES)


def start_fork_server(workers: int) -> None:
    """Start the fork server, which imports the modules of workers in the background.

    Args:
        workers: number of workers that share the cores.
    """
    if not workers or not can_fork():
        return
    _context.set_forkserver_preload(["hpsearch.search.fleet.preload"])
    with contextlib.suppress(OSError, ObjectiveError):
        # PYTHONSAFEPATH: a module in the working folder must not hide an installed package of the same name.
        environment = {
            **thread_environment(workers),
            "PYTHONSAFEPATH": "1",
            SOCKET_FOLDER_VARIABLE: make_socket_folder(),
        }
        with _start_lock, _environment(environment), _silence_output():
            forkserver.ensure_running()


def resume_fork_server() -> None:
    """Resume the fork server if it is suspended, because it reports the exits of workers."""
    if (pid := forkserver._forkserver._forkserver_pid) is not None:  # type: ignore[attr-defined]  # private
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _silence_output() -> Iterator[None]:
    """Discard the output of processes that are started in this block.

    After a fleet is killed, the fork server lives until the last worker has ended. If the server inherited the fleet's
    output, a program that reads this output would wait for the server.
    """
    kept = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    try:
        _redirect(os.devnull, os.O_WRONLY, list(kept))
        yield
    finally:
        for descriptor, copy in kept.items():
            os.dup2(copy, descriptor)
            os.close(copy)


class ForkedProcess:
    """A forked process that runs a function, with its own session, no input, and all output in a file.

    The methods have the same meaning as in :class:`subprocess.Popen`.

    Args:
        work: picklable function that returns the exit code.
        command: arguments of the equivalent command line, which MLflow runs record as their command.
        environment: the complete environment of the process.
        log: file to which the output is appended.

    Raises:
        OSError: the fork failed, or other users could replace the socket of the fork server.
    """

    def __init__(self, work: Callable[[], int], command: list[str], environment: dict[str, str], log: Path) -> None:
        try:
            make_socket_folder()  # otherwise multiprocessing uses the temporary folder
        except ObjectiveError as error:
            raise OSError(errno.EACCES, str(error)) from None
        self._process = _context.Process(target=_run_forked, args=(work, command, environment, str(log)))
        with _start_lock, _hide_main_module():
            self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, which is negative after a signal; None while the process runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


@contextlib.contextmanager
def _hide_main_module() -> Iterator[None]:
    """Hide the main module in this block, because `multiprocessing` would run the user's script in each worker."""
    program, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program


def _run_forked(work: Callable[[], int], command: list[str], environment: dict[str, str], log: str) -> None:
    os.setsid()
    _redirect(os.devnull, os.O_RDONLY, [0])
    _redirect(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, [1, 2])
    take_exit_file(environment)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = command
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # otherwise all workers have the same random state
    # Processes that a worker starts, such as those of a data loader, use the default start method again.
    multiprocessing.set_start_method(None, force=True)
    try:
        code = report_errors(work)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0
    ignore_stop_signals()
    prepare_exit(code)
    gc.freeze()  # otherwise the interpreter searches all objects for cycles when it exits
    sys.exit(code)


def _redirect(path: str, flags: int, descriptors: list[int]) -> None:
    opened = os.open(path, flags, 0o666)
    for descriptor in descriptors:
        os.dup2(opened, descriptor)
    if opened not in descriptors:
        os.close(opened)
