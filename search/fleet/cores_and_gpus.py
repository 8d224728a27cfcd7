"""Cores and GPUs of this machine, and their division among workers."""

from __future__ import annotations

import os
from pathlib import Path

from hpsearch.search.errors import SearchError

_PROCESS_CGROUPS = Path("/proc/self/cgroup")


_CGROUP_ROOT = Path("/sys/fs/cgroup")


def count_cores() -> int:
    """Return the number of cores that this process may use, given its CPU affinity and the CPU limit of its cgroup."""
    given = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = read_cgroup_cpu_limit()
    return given if limit is None else max(1, min(given, int(limit)))


def read_cgroup_cpu_limit(mine: Path = _PROCESS_CGROUPS, mounted: Path = _CGROUP_ROOT) -> float | None:
    """Return the CPU limit, in cores, of this process's cgroup; None if there is no limit.

    Slurm, Kubernetes and systemd set such limits.

    Args:
        mine: file that lists the cgroups of this process.
        mounted: mount point of the cgroup file system. In a container, this file system often has only the container's
            own cgroups, and under another path than in `mine`.
    """
    limits = []
    for line in _read(mine).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = mounted, ["cpu.max"]
        elif "cpu" in controllers.split(","):
            root, names = mounted / "cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        folder = root / path.lstrip("/")
        for above in (folder, *folder.parents):  # the lowest limit of all levels of the hierarchy applies
            if above.is_relative_to(root) and (limit := _parse_limit(" ".join(_read(above / name) for name in names))):
                limits.append(limit)
    return min(limits, default=None)


def _parse_limit(text: str) -> float | None:
    """Return the number of cores for a text ``QUOTA PERIOD``; None if it sets no limit (``max``, -1, or no file)."""
    try:
        quota, period = map(int, text.split())
        return quota / period if quota > 0 else None
    except (ValueError, ZeroDivisionError):
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def thread_environment(workers: int) -> dict[str, str]:
    """Return environment variables that limit the threads of each worker to its share of the cores.

    If there are more threads than cores, every worker is several times slower.
    """
    threads = str(max(1, count_cores() // max(1, workers)))
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)


def visible_gpus() -> list[str]:
    """Return the CUDA devices that this process may use, as entries of ``CUDA_VISIBLE_DEVICES``."""
    import torch

    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [part.strip() for part in given.split(",") if part.strip()]
    return [str(i) for i in range(torch.cuda.device_count())]


def assign_gpus(index: int, gpus: list[str], gpus_per_trial: int) -> list[str]:
    """Return the GPUs of the worker with this index. If there are too few GPUs, workers share them."""
    sets = max(1, len(gpus) // gpus_per_trial)
    first = index % sets * gpus_per_trial
    return gpus[first : first + gpus_per_trial]


def count_gpu_workers(gpus: list[str], *, workers_per_gpu: int, gpus_per_trial: int) -> int:
    """Return the number of workers if `workers_per_gpu` workers share each set of `gpus_per_trial` GPUs.

    Raises:
        SearchError: there are fewer than `gpus_per_trial` GPUs.
    """
    if len(gpus) < gpus_per_trial:
        raise SearchError(
            f"--devices: each trial uses {gpus_per_trial} GPUs, but this machine has {len(gpus)}; "
            f"give --workers instead of --workers-per-gpu {workers_per_gpu}"
        )
    return workers_per_gpu * (len(gpus) // gpus_per_trial)
