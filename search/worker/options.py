"""Options of worker processes. Flags, environment variables and help texts are generated from the fields."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Self, TypedDict, cast

from pydantic import Field, ValidationError, model_validator

from hpsearch.search.errors import SearchError
from hpsearch.search.spec.kinds import Number, Options, format_validation_error
from hpsearch.storage.trials import LEASE
from hpsearch.storage.urls import Addresses

MAX_DEVICES = 1024
MAX_LOCAL_WORKERS = 512  # on one machine
MAX_TIMEOUT_SECONDS = 365 * 86_400  # much longer timeouts overflow in torch
DEFAULT_GRACE_SECONDS = 30.0  # the default of Kubernetes, and of Slurm after a time limit

# Options of single workers, which a fleet does not pass on in the environment.
PER_WORKER_OPTIONS = {"device", "tracking_required", "idle_timeout", "max_trials", "max_time", "heartbeat", "nodes"}


class FleetWorkerOptions(TypedDict, total=False):
    """Options that all workers of a fleet share; see `WorkerOptions` for their meaning."""

    devices: int
    collective_timeout: float | None
    barrier_timeout: float
    grace: float
    save_every: float | None
    stall_factor: float | None
    lease: float
    system_metrics: bool


class WorkerOptions(Options):
    """Options of a worker process: addresses, devices and limits. The name of the study is not among them.

    Raises:
        SearchError: a value is out of range.
    """

    device: str | None = Field(
        default=None, description="Device to train on: cpu, cuda or cuda:N  [default: cuda if available]"
    )
    devices: int = Field(
        default=1,
        ge=1,
        le=MAX_DEVICES,
        description="Devices of this machine that train each trial together, one process per device",
    )
    nodes: int = Field(
        default=1,
        ge=1,
        le=MAX_DEVICES,
        description="Machines that train each trial together, each with --devices processes; start this command on "
        "each machine, by srun or with MASTER_ADDR and MASTER_PORT set",
    )
    collective_timeout: Number | None = Field(
        default=None,
        gt=0,
        le=MAX_TIMEOUT_SECONDS,
        description="Timeout in seconds of collective operations of a trial's devices, after the first training step  "
        "[default: half of --lease]",
    )
    barrier_timeout: Number = Field(
        default=1800.0,
        gt=0,
        le=MAX_TIMEOUT_SECONDS,
        description="Seconds that a trial's devices wait for one that loads data, evaluates, reports or saves, and "
        "that a worker may take to export a model and publish the results",
    )
    grace: Number = Field(
        default=DEFAULT_GRACE_SECONDS,
        ge=0,
        description="Seconds from SIGTERM to SIGKILL; if the epoch cannot finish in time, the worker "
        "writes a mid-epoch checkpoint",
    )
    save_every: Number | None = Field(
        default=None,
        gt=0,
        description="Minutes between mid-epoch checkpoints of long epochs  [default: none, only at the "
        "end of each epoch]",
    )
    idle_timeout: Number | None = Field(
        default=None,
        ge=0,
        description="Exit after N seconds without a trial to run while other workers run the remaining trials",
    )
    max_trials: int | None = Field(default=None, ge=1, description="Exit after N trials")
    max_time: Number | None = Field(default=None, ge=0, description="Exit after N seconds as after SIGTERM")
    stall_factor: Number | None = Field(
        default=None,
        gt=1,
        description="Restart a worker and release its trial when a step takes N times as long as its "
        "longest step so far",
    )
    heartbeat: str | None = Field(default=None, description="File to touch at each training step, for a liveness probe")
    lease: Number = Field(
        default=LEASE,
        ge=1,
        le=86_400,
        description="Seconds without a heartbeat after which another worker may take over a trial",
    )
    tracking_required: bool = Field(
        default=False,
        description="Exit if MLflow does not answer at the start; without this flag, metrics wait on disk",
    )
    system_metrics: bool = Field(default=False, description="Log CPU, memory, disk, network and GPU usage of trials")
    storage_url: str | None = Field(
        default=None,
        description="Postgres of the studies, postgresql://USER@HOST/DATABASE  [default: embedded Postgres]",
    )
    tracking_uri: str | None = Field(
        default=None, description="MLflow server, http(s)://HOST:PORT  [default: embedded MLflow]"
    )
    checkpoint_url: str | None = Field(
        default=None,
        description="Folder or fsspec URL (s3://BUCKET/PREFIX) of the checkpoints, accessible from all "
        "machines; stored with the study  [default: in --home]",
    )
    home: str | None = Field(
        default=None,
        description="Folder of the embedded services, checkpoints and logs  [default: the user's data folder]",
    )

    @model_validator(mode="wrap")
    @classmethod
    def _format_errors(cls, values: Any, validate: Callable[[Any], Self]) -> Self:
        try:
            return validate(values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            flag, variable = format_flag(name := str(first["loc"][0])), format_variable(name)
            setting = f"{flag} or {variable}" if variable in os.environ else flag
            raise SearchError(format_validation_error(setting, first)) from None

    @property
    def world_size(self) -> int:
        """The number of processes that train a trial together."""
        return self.devices * self.nodes

    @property
    def addresses(self) -> Addresses:
        """The addresses of the services."""
        return cast(Addresses, self.model_dump(include=set(Addresses.__annotations__)))

    def environment(self) -> dict[str, str]:
        """Return the options as environment variables, which other users cannot read, unlike the command line."""
        given = self.model_dump(exclude=PER_WORKER_OPTIONS, exclude_none=True)
        used = {name: value for name, value in given.items() if value is not False and (name, value) != ("devices", 1)}
        return {format_variable(name): "1" if value is True else str(value) for name, value in used.items()}


def format_flag(name: str) -> str:
    """Return the flag of an option."""
    return f"--{name.replace('_', '-')}"


def format_variable(name: str) -> str:
    """Return the environment variable of an option."""
    return f"HPSEARCH_{name.upper()}"
