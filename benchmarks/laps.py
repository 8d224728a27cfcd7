"""Measure the time of the main thread of a worker by label, counting each second once."""

from __future__ import annotations

import functools
import inspect
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from pathlib import Path

import psutil

FOLDER = "BENCH_LAPS"  # environment variable: folder for the measurements of the watched processes
REST = "the rest"


class Laps:
    """Times by label. Labels nest: time under an inner label does not count under the outer one."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.first: float | None = None  # Unix time at which work began
        self._thread = threading.get_ident()
        self._labels = [REST]
        self._since = time.perf_counter()

    @contextmanager
    def __call__(self, label: str) -> Iterator[None]:
        """Count the time in the context under `label`, except on other threads."""
        if threading.get_ident() != self._thread:
            yield
            return
        self._turn()
        self._labels.append(label)
        try:
            yield
        finally:
            self._turn()
            self._labels.pop()

    def _turn(self) -> None:
        now = time.perf_counter()
        self.seconds[self._labels[-1]] += now - self._since
        self._since = now

    def begin(self) -> None:
        """Begin to measure, unless already begun: discard the times of the start of the process."""
        if self.first is None:
            self._turn()
            self.seconds.clear()
            self.first = time.time()

    def watch(self, owner: object, name: str, label: str) -> None:
        """Count every call of `owner.name` under `label`."""
        inner: Callable[..., object] = getattr(owner, name)

        @functools.wraps(inner)
        def timed(*args: object, **kwargs: object) -> object:
            with self(label):
                return inner(*args, **kwargs)

        timed.watched = True
        setattr(owner, name, timed)

    def watch_all(self, owner: type, label: str) -> None:
        """Count calls of public methods of `owner` under `label`, except for those that are watched already."""
        for name, method in list(vars(owner).items()):
            plain = inspect.isfunction(method) and not inspect.isgeneratorfunction(inspect.unwrap(method))
            if plain and not name.startswith("_") and not hasattr(method, "watched"):
                self.watch(owner, name, label)

    def write_at_exit(self, folder: str) -> None:
        """Write the measurements to a file in `folder` when the process ends."""
        # Forked processes do not run `atexit` functions.
        Finalize(None, self._write, args=(Path(folder) / f"{os.getpid()}.json",), exitpriority=0)

    def _write(self, path: Path) -> None:
        self._turn()
        times = os.times()
        found = {
            "started": psutil.Process().create_time() + _boot_error(),
            "first": self.first,
            "ended": time.time(),
            "cpu": times.user + times.system + times.children_user + times.children_system,
            # CPU time of the process that all workers were forked from, if they were.
            "cpu_before": sum(psutil.Process(os.getppid()).cpu_times()[:2]) if parent_process() else 0.0,
            "seconds": self.seconds,
        }
        path.write_text(json.dumps(found))


def _boot_error() -> float:
    """Return the seconds by which times of psutil are early: it reads the boot time in whole seconds."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) - psutil.boot_time()
