"""Run searches in processes, with a line of progress each minute."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from typing import TypeVar

One = TypeVar("One")
Found = TypeVar("Found")


def run_all(work: Callable[[One], Found], searches: list[One], processes: int) -> dict[One, Found]:
    """Return the result of each search; one process means this one."""
    done: dict[One, Found] = {}
    said = time.monotonic()
    with nullcontext() if processes == 1 else ProcessPoolExecutor(processes) as pool:
        for one, found in zip(searches, (pool.map if pool else map)(work, searches), strict=True):
            done[one] = found
            if time.monotonic() - said > 60:
                said = time.monotonic()
                print(f"{len(done)} of {len(searches)} searches", file=sys.stderr, flush=True)
    return done
