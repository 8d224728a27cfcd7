"""How a process of ours begins and ends: where it finds the user's code, its signals, its mistakes, its exit code."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from hpsearch.search.errors import USER_ERRORS
from hpsearch.storage.errors import AwayError
from hpsearch.storage.urls import redact

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
