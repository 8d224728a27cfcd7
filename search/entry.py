"""How a process of ours begins and ends: where it finds the user's code, what it tells of a mistake, its exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from search.errors import USER_ERRORS

# 0 is done, or nothing left to do; 1 an error of ours or of a service.
EXIT_USER_ERROR = 2  # a setting is wrong: one line says which
EXIT_GAVE_UP = 3  # of a worker: the objective fails every trial
EXIT_INTERRUPTED = 128 + 2
EXIT_DRAINED = 128 + 15


def find_modules_here() -> None:
    """Look for `pkg.module:Class` and my_objective.py where the command is run, too, as `python -m` does."""
    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109 sys.path holds strings
        sys.path.append(here)


def telling_mistakes(work: Callable[[], int]) -> int:
    """Do the work and return its exit code; a mistake of the user is told in one line. All else is ours, and raised."""
    try:
        return work()
    except USER_ERRORS as error:
        print(f"hpsearch: {error}", file=sys.stderr, flush=True)  # noqa: T201 it is for the user
        return EXIT_USER_ERROR
