"""Exit codes, and the forced exit of a process in which threads or processes of user code still run."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import sys
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from hpsearch.objectives.private_folders import remove_temporary_folders
from hpsearch.standard_streams import write_to_stderr

# Engines restart workers after exit codes 1 and 143, never after 0, 2 or 3.
EXIT_DONE = 0  # worker: the budget is spent, or the study is stopped
EXIT_UNAVAILABLE = 1  # a service is unavailable, or an internal error: a retry may succeed
EXIT_USER_ERROR = 2  # a setting is wrong
EXIT_GAVE_UP = 3  # worker: every trial fails, or the last ones fail with the same error
EXIT_INTERRUPTED = 128 + 2  # Ctrl-C
EXIT_DRAINED = 128 + 15  # worker: stopped by a signal with work left


EXIT_FILE_VARIABLE = "HPSEARCH_EXIT_FILE"  # file to which a worker of a fleet writes its exit code
_EXIT_SECONDS = 5.0
_START_SECONDS = 1.0
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
    has_started = threading.Event()

    def end() -> None:
        has_started.set()
        _end_process(code)

    with contextlib.suppress(RuntimeError):  # the limit of threads is reached
        start_new_thread(end, ())  # Thread.start waits forever for a thread that gets no memory
        # If the interpreter ends before the thread runs, it frees the thread's state, and the thread crashes.
        has_started.wait(_START_SECONDS)


def call_at_end(function: Callable[[], object]) -> None:
    """Call a function when this process ends, also by a signal, or if threads of user code prevent a normal exit."""
    atexit.register(function)
    _at_end.append((os.getpid(), function))


_at_end: list[tuple[int, Callable[[], object]]] = []  # with the process, whose copies must not call the functions


def run_at_end() -> None:
    """Call the functions of `call_at_end`, and remove this process's temporary folders."""
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
            write_to_stderr(f"hpsearch: {caller} has ended the process with os._exit({status}); remove the call\n")
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
    run_at_end()
    with contextlib.suppress(Exception):
        if left:
            print(f"hpsearch: ended while code of the objective was running: {', '.join(left)}", file=sys.stderr)  # noqa: T201 output
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
