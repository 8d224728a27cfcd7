"""Where the processes that train a trial together meet: on this machine, or at the first of several."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpsearch.search.errors import SearchError

_LAST_PORT = 65_535
_FIRST_PORT, _PORTS = 20_000, 10_000  # of a Slurm job, by its number: two jobs of a node seldom have the same


@dataclass(frozen=True)
class Rendezvous:
    """Where they meet.

    Attributes:
        endpoint: ``HOST:PORT``; or a file, where they are on one machine: nobody else can speak to them.
        run_id: what tells this worker's processes from another's.
        local_addr: this machine's, to the others; None lets torch look it up.
        file: by which the processes themselves meet, on one machine.
    """

    endpoint: str
    run_id: str
    local_addr: str | None = None
    file: Path | None = None

    @property
    def options(self) -> dict[str, str]:
        """What torch's launcher is told of it besides."""
        return {} if self.file is None else {"store_type": "file"}


def rendezvous(nodes: int, environment: Mapping[str, str], folder: Path) -> Rendezvous:
    """Return where the processes of a worker meet that runs on so many machines.

    Of several machines Slurm names the first; else `MASTER_ADDR` and `MASTER_PORT` do, as for torchrun.

    Args:
        nodes: how many machines.
        environment: of this process.
        folder: that only this user can enter.

    Raises:
        SearchError: nothing says where, or the job has another number of machines.
    """
    if nodes == 1:
        return Rendezvous(str(folder / "launcher"), "worker", "127.0.0.1", folder / "ranks")
    given = environment.get
    if (host := given("MASTER_ADDR")) and (port := given("MASTER_PORT")):
        if not (port.isdigit() and 0 < int(port) <= _LAST_PORT):
            raise SearchError(f"MASTER_PORT is {port!r}: it must be a port, from 1 to {_LAST_PORT}")
        return Rendezvous(f"{host}:{port}", given("TORCHELASTIC_RUN_ID") or f"hpsearch-{port}")
    if (job := given("SLURM_JOB_ID")) and (hosts := given("SLURM_JOB_NODELIST")):
        if (has := given("SLURM_NNODES", str(nodes))) != str(nodes):
            raise SearchError(f"--nodes {nodes}, but this job of Slurm has {has}: give --nodes {has}")
        step = given("SLURM_STEP_ID", "0")
        port = str(_FIRST_PORT + int(job) % _PORTS)
        return Rendezvous(f"{_first_of(hosts)}:{port}", f"hpsearch-{job}.{step}")
    raise SearchError(
        f"--nodes {nodes}: set MASTER_ADDR and MASTER_PORT to one of the machines and a free port of it, the same on "
        "all; under Slurm's srun neither is needed"
    )


def _first_of(hosts: str) -> str:
    """Return the first of Slurm's hosts, which it writes as ``node[01-08]``."""
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        raise SearchError("--nodes under Slurm needs its scontrol here: else set MASTER_ADDR and MASTER_PORT")
    found = subprocess.run([scontrol, "show", "hostnames", hosts], capture_output=True, text=True, check=False)
    if found.returncode or not found.stdout.split():
        raise SearchError(f"SLURM_JOB_NODELIST is {hosts!r}, of which scontrol knows no host")
    return found.stdout.split()[0]
