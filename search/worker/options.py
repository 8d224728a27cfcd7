"""The options of a worker process, and its identity."""

from __future__ import annotations

import hashlib
import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.metadata import version
from typing import TypedDict

from hpsearch.search.errors import SearchError
from hpsearch.storage.trials.claims import LEASE
from hpsearch.storage.trials.process_identity import process_name
from hpsearch.storage.trials.register import Identity

_MOST_DEVICES = 1024
GRACE = 30.0  # seconds: what Kubernetes gives, and Slurm after a time limit


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


class Working(TypedDict, total=False):
    """How the workers of a fleet run: see `WorkerOptions`."""

    lease: float
    grace: float
    save_every: float | None
    stall: float | None
    system_metrics: bool
    devices: int
    collective_timeout: float | None


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker is told beside the study's name: where things are, and how it runs on its machine.

    Attributes:
        storage_url, tracking_uri, checkpoint_url: where studies, runs and checkpoints are kept; without a tracking
            URI or a checkpoint URL the study's own, without any the embedded stack's.
        home: folder of the embedded stack, run directories and logs; by default the user's.
        device: "cpu", "cuda" or "cuda:N"; by default a GPU where there is one.
        lease: seconds without a sign of life after which others take its trial over.
        tracking_required: whether MLflow has to answer at the start.
        system_metrics: whether the machine's load is logged to each trial's run.
        grace: seconds from the signal that tells it to go to the kill: an epoch that does not end in time is saved in
            its midst.
        save_every: minutes after which an epoch that is longer is saved in its midst; never unless given.
        leave_when_idle: seconds without a trial to take, while others run theirs, after which it leaves.
        max_trials: after so many it leaves.
        max_time: seconds after which it leaves, as if it were told to.
        stall: it is restarted, and its trial given back, when there is no step for so many times the longest so far.
        heartbeat: a file that is touched while it gets on, for probes.
        devices: of this machine that train each trial together, a process each.
        nodes: machines with so many each.
        collective_timeout: seconds in which all of these have to come to a step; half of the lease unless given.

    Raises:
        SearchError: a number is out of range.
    """

    storage_url: str | None = None
    tracking_uri: str | None = None
    checkpoint_url: str | None = None
    home: str | None = None
    device: str | None = None
    lease: float = LEASE
    tracking_required: bool = False
    system_metrics: bool = False
    grace: float = GRACE
    save_every: float | None = None
    leave_when_idle: float | None = None
    max_trials: int | None = None
    max_time: float | None = None
    stall: float | None = None
    heartbeat: str | None = None
    devices: int = 1
    nodes: int = 1
    collective_timeout: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("grace", 0), ("leave_when_idle", 0), ("max_trials", 1), ("max_time", 0)):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= least):
                raise SearchError(f"{_flag(name)} {value}: must be a finite number from {least}")
        for name in ("devices", "nodes"):
            if not 1 <= (count := getattr(self, name)) <= _MOST_DEVICES:
                raise SearchError(f"{_flag(name)} {count}: must be from 1 to {_MOST_DEVICES}")
        for name, above in (("save_every", 0), ("stall", 1), ("collective_timeout", 0)):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > above):
                raise SearchError(f"{_flag(name)} {value}: must be a finite number above {above}")

    @property
    def world(self) -> int:
        """How many processes train a trial together."""
        return self.devices * self.nodes

    def environment(self) -> dict[str, str]:
        """Return the same for a worker that is a command: a URL may hold a password, and arguments are seen by all."""
        # What holds for a single worker alone is not for those of a fleet.
        alone = {"device", "tracking_required", "leave_when_idle", "max_trials", "max_time", "heartbeat", "nodes"}
        found = {}
        for name in (field.name for field in fields(self) if field.name not in alone):
            value = getattr(self, name)
            if value is not None and value is not False and (name, value) != ("devices", 1):
                found[f"HPSEARCH_{name.upper()}"] = "1" if value is True else str(value)
        return found


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
