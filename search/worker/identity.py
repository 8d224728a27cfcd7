"""The identity of a worker process: its name, device and the engine that started it."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping
from importlib.metadata import version

from hpsearch.storage.trials.process_identity import process_name
from hpsearch.storage.trials.register import Identity


def worker_name(pid: int | None = None) -> str:
    """Return ``host:pid-mark``, by default of this process.

    The mark tells apart what containers call alike: it is of the machine's boot, the container and the process's start.
    """
    pid = pid or os.getpid()
    mark = hashlib.sha256(process_name(pid).encode()).hexdigest()[:4]
    return f"{socket.gethostname()}:{pid}-{mark}"


def worker_identity(device: str | None, devices: int = 1) -> Identity:
    """Return this process's, where it trains on `device`; a GPU where there is one, unless given.

    Args:
        device: of this process.
        devices: such ones that train each trial together.
    """
    engine, job = engine_of(os.environ)
    on = device or default_device()
    if devices > 1:
        on = f"{devices} x {on.partition(':')[0]}"
    return Identity(worker_name(), socket.gethostname(), os.getpid(), engine, job, on, version("hpsearch"))


def default_device() -> str:
    """Return where trials are trained unless it is said."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def engine_of(environment: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Return what started a process of this environment, and what that calls it."""
    given = environment.get
    if job := given("SLURM_JOB_ID"):
        array, task = given("SLURM_ARRAY_JOB_ID"), given("SLURM_ARRAY_TASK_ID")
        return "slurm", f"{array}_{task}" if array and task else job
    if job := given("RAY_JOB_ID"):
        return "ray", job
    if given("KUBERNETES_SERVICE_HOST"):
        return "kubernetes", given("HOSTNAME")
    if fleet := given("HPSEARCH_FLEET_PID"):
        return "hpsearch run", fleet
    if unit := given("INVOCATION_ID"):
        return "systemd", unit[:8]
    return None, None
