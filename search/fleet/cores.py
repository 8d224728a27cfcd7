"""The processors that this process may use, and how worker processes divide them."""

from __future__ import annotations

import os
from pathlib import Path

_MINE = Path("/proc/self/cgroup")
_MOUNTED = Path("/sys/fs/cgroup")


def cores() -> int:
    """Return how many processors this process may use: of the machine, by its affinity, by its cgroup's limit."""
    given = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = cgroup_limit()
    return given if limit is None else max(1, min(given, int(limit)))


def cgroup_limit(mine: Path = _MINE, mounted: Path = _MOUNTED) -> float | None:
    """Return how many processors' time the cgroup grants, which Slurm, Kubernetes and systemd set; None for any.

    Args:
        mine: the file that names this process's cgroups.
        mounted: where they are mounted; in a container often those of its own alone, below another name.
    """
    limits = []
    for line in _read(mine).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit_in = mounted, _limit_v2
        elif "cpu" in controllers.split(","):
            root, limit_in = mounted / "cpu", _limit_v1
        else:
            continue
        folder = root / path.lstrip("/")
        for above in (folder, *folder.parents):  # the least of all levels holds
            if above.is_relative_to(root) and (limit := limit_in(above)) is not None:
                limits.append(limit)
    return min(limits, default=None)


def _limit_v2(folder: Path) -> float | None:
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    return _ratio(quota, period)


def _limit_v1(folder: Path) -> float | None:
    return _ratio(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))


def _ratio(quota: str, period: str) -> float | None:
    """Return the processors that a quota of time in a period makes; "max", -1 and nothing at all are no limit."""
    try:
        found = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return found if found > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def thread_settings(workers: int) -> dict[str, str]:
    """Return the environment that divides the cores: more threads than cores make every worker several times slower."""
    threads = str(max(1, cores() // max(1, workers)))
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)
