"""A private Slurm cluster on this machine: a controller and three nodes on loopback, with their own munge."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.search.launch.memory import CGROUPS, remove_cgroup

PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "squeue", "scontrol")
NODES = ("n1", "n2", "n3")

_CONF = """
ClusterName=hpsearch
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin={task_plugin}
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_interval=5,bf_interval=5
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
SlurmdTimeout={slurmd_timeout}
KillWait={kill_wait}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""

_CGROUP_CONF = """
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
ConstrainRAMSpace=yes
"""


def missing() -> list[str]:
    """Return the Slurm programs that this machine lacks."""
    return [name for name in NEEDED if shutil.which(name, path=PATH) is None]


@dataclass
class Cluster:
    """A running cluster."""

    folder: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PATH": PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self, name: str, *command: str) -> None:
        log = (self.folder / f"{name}.out").open("wb")
        self.daemons[name] = subprocess.Popen(
            command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )

    def run(self, *command: str, input: str = "", **environment: str) -> str:  # noqa: A002 as subprocess names it
        done = subprocess.run(
            command, input=input, env={**self.environment, **environment}, capture_output=True, text=True,
            cwd=self.folder, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def states(self, job: str) -> dict[str, str]:
        """Return the state of each unfinished task of an array."""
        lines = self.run("squeue", "-h", "-r", "-j", job, "-o", "%K %T").splitlines()
        return dict(line.split() for line in lines)

    def logs(self, name: str = "*") -> str:
        """Return the logs of a study's tasks."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob(f"hpsearch-{name}-*.log")))

    def lose(self, node: str) -> None:
        """Kill a node's daemon and all its processes at once."""
        in_steps = _list_processes(self.folder, node)
        steps = {parent for each in in_steps for parent in each.parents() if parent.name().startswith("slurmstepd")}
        lost = [psutil.Process(self.daemons[node].pid), *steps, *in_steps]
        for number in (signal.SIGSTOP, signal.SIGKILL):  # first suspended: a step would report the end of its script
            for process in lost:
                process.send_signal(number)

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = 240) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"waited in vain for {what}\n{self.run('squeue')}\n{self.logs()[-5000:]}"
            time.sleep(0.5)  # until a condition holds


def _free_ports(number: int) -> list[int]:
    made = [socket.socket() for _ in range(number)]
    for one in made:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in made]
    for one in made:
        one.close()
    return ports


@contextmanager
def slurm_cluster(
    folder: Path, *, kill_wait: int = 20, slurmd_timeout: int = 30, limits_memory: bool = False
) -> Iterator[Cluster]:
    """Run a cluster in a folder during the block; end all its processes after it.

    Args:
        folder: folder for the configuration, state and logs of the cluster.
        kill_wait: seconds from SIGTERM to SIGKILL. A job in the partition `urgent` preempts jobs in `all`.
        slurmd_timeout: seconds without an answer after which a node is lost.
        limits_memory: whether the kernel kills processes of a job that uses more memory than its --mem, by cgroups.
    """
    cluster = Cluster(folder)
    controller, *ports = _free_ports(1 + len(NODES))
    host = socket.gethostname().split(".")[0]
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=4000 State=UNKNOWN"
        for name, port in zip(NODES, ports, strict=True)
    )
    (folder / "state").mkdir()
    for name in NODES:
        (folder / f"spool-{name}").mkdir()
    # The cgroups of jobs have their IDs as names, so each cluster on a machine has its own IDs.
    values = {"first_job": controller, "kill_wait": kill_wait, "slurmd_timeout": slurmd_timeout, "nodes": nodes}
    values["task_plugin"] = "task/cgroup" if limits_memory else "task/none"
    (folder / "cgroup.conf").write_text(_CGROUP_CONF)
    (folder / "slurm.conf").write_text(_CONF.format(host=host, port=controller, folder=folder, **values))
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    try:
        cluster.start(
            *("munged", "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}"),
            *(f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munge.seed", "--num-threads=2"),
        )
        cluster.wait((folder / "munge.socket").exists, "munge", 30)
        cluster.start("slurmctld", "slurmctld", "-D", "-c")
        for name in NODES:
            cluster.start(name, "slurmd", "-D", "-N", name)
        up = ("sinfo", "-h", "-t", "idle", "-o", "%D")
        cluster.wait(lambda: _tried(cluster, *up) == str(len(NODES)), "the nodes", 60)
        yield cluster
    finally:
        for process in _list_processes(folder):
            process.kill()
        for daemon in cluster.daemons.values():
            daemon.kill()
            daemon.wait()
        if limits_memory:
            for name in NODES:
                remove_cgroup(CGROUPS / f"slurm_{name}")


def _tried(cluster: Cluster, *command: str) -> str:
    done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip()


def _list_processes(folder: Path, node: str | None = None) -> list[psutil.Process]:
    """Return the steps of the cluster and the processes in them, parents first."""
    return [process for process in psutil.process_iter() if _is_of(process, folder, node)]


def _is_of(process: psutil.Process, folder: Path, node: str | None = None) -> bool:
    """Return whether a process is a Slurm step or in one, of any or one node: these survive a killed daemon."""
    try:
        environment = process.environ()
        is_of_node = node is None or environment.get("SLURMD_NODENAME") == node
        return is_of_node and environment.get("SLURM_CONF") == str(folder / "slurm.conf") and process.pid != os.getpid()
    except psutil.Error:
        return False
