"""The processors of this machine, and how worker processes divide them."""

from __future__ import annotations

import os


def cores() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def thread_settings(workers: int) -> dict[str, str]:
    """Return the environment that divides the cores: more threads than cores make every worker several times slower."""
    threads = str(max(1, cores() // max(1, workers)))
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)
