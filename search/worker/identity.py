"""The identity of a worker process: its name, its device, and the engine that started the process."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from importlib.metadata import version

from hpsearch.host_name import get_host_name
from hpsearch.storage.trials.process_identity import make_process_name
from hpsearch.storage.trials.worker_registry import WorkerIdentity


def worker_name(pid: int | None = None) -> str:
    """Return the worker name ``host:pid-mark`` of a process; if `pid` is None, of this process.

    The mark is a hash of the machine's boot, the container and the process start, because containers may share host
    names and PIDs.
    """
    pid = pid or os.getpid()
    mark = hashlib.sha256(make_process_name(pid).encode()).hexdigest()[:4]
    return f"{get_host_name()}:{pid}-{mark}"


def worker_identity(device: str | None, devices: int = 1) -> WorkerIdentity:
    """Return the identity of this process.

    Args:
        device: device of the process; None selects a GPU if there is one, else the CPU.
        devices: number of devices of this kind that train each trial together.
    """
    engine, job = read_engine_and_job(os.environ)
    device = device or get_default_device()
    if devices > 1:
        device = f"{devices} x {device.partition(':')[0]}"
    return WorkerIdentity(worker_name(), get_host_name(), os.getpid(), engine, job, device, version("hpsearch"))


def get_default_device() -> str:
    """Return the device for a worker without the option `--device`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def read_engine_and_job(environment: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Return the engine that started a process with this environment, and the engine's job id; None if unknown."""
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
