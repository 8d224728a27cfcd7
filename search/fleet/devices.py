"""Workers that train on several devices: ranks, rendezvous and private folders."""

from __future__ import annotations

import fcntl
import logging
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from hpsearch.objectives.training.data.loader import ending_with_parent
from hpsearch.search.errors import SearchError
from hpsearch.search.fleet.fork import can_fork
from hpsearch.search.process import (
    EXIT_AWAY,
    EXIT_DRAINED,
    EXIT_INTERRUPTED,
    StopEvent,
    exit_on_signals,
    report_errors,
    stop_on_signals,
    stop_worker_on_signals,
    watch_fleet,
)
from hpsearch.search.worker.identity import default_device
from hpsearch.search.worker.options import WorkerOptions

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


def rendezvous(nodes: int, environment: Mapping[str, str], folder: Path) -> Rendezvous:
    """Return where the processes of a worker meet that runs on so many machines.

    Of several machines Slurm names the first; else `MASTER_ADDR` and `MASTER_PORT` do, as for torchrun.

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


_PREFIX = "hpsearch-ranks-"


@contextmanager
def private_folder() -> Iterator[Path]:
    """Make a folder for this process and those it forks; before that remove those of this user whose processes died.

    Who lives holds the lock of its folder: a killed process lets go of it, and no other can have its number.
    """
    _remove_left()
    made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))  # under a name that nobody looks at: it is not locked yet
    held = os.open(made, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    folder = made.rename(made.with_name(made.name.removeprefix(".")))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _remove_left() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # its process lives, or another launcher has just removed it
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(held).st_uid == os.getuid():
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(held)


log = logging.getLogger(__name__)

_ENDING = 10  # seconds that ranks have to end by themselves when one of them has died
_LOOK = 0.2  # seconds between two looks whether this worker is told to go


def join_on_devices(name: str, options: WorkerOptions) -> int:
    """Be a worker of study `name` on `options.devices` devices of this machine; return rank 0's exit code.

    With `options.nodes` it is called on each of so many machines.

    Where a rank dies all are ended, the trial is left to others, and the exit code is that of a service that is away:
    whoever started this worker may start it again.

    Raises:
        SearchError: there are not so many devices, or nothing says where the machines meet.
    """
    check_devices(options)
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for torchs in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):  # they tell a dead rank at length
        logging.getLogger(torchs).setLevel(logging.CRITICAL)
    fork = can_fork()
    with private_folder() as folder:
        stop = _stop_ranks_on_signals(folder)
        place = rendezvous(options.nodes, os.environ, folder)
        if place.file is not None:  # else the launcher opens a port, on all of this machine's addresses
            os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        config = LaunchConfig(
            min_nodes=options.nodes,
            max_nodes=options.nodes,
            nproc_per_node=options.devices,
            run_id=place.run_id,
            rdzv_backend="c10d",
            rdzv_endpoint=place.endpoint,
            rdzv_configs={} if place.file is None else {"store_type": "file"},
            local_addr=place.local_addr,
            max_restarts=0,  # whoever started this worker starts it again, and counts how often
            start_method="fork" if fork else "spawn",
            signals_to_handle="SIGQUIT",  # the others are passed on, and ranks leave in their own time
            shutdown_timeout=_ENDING,
            logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
        )
        try:
            codes = elastic_launch(config, _be_rank)(ending_with_parent(), name, options, place.file)
        except (ChildFailedError, RendezvousConnectionError) as error:
            if stop.is_set():
                return EXIT_DRAINED
            why = f"the machines' meeting at {place.endpoint} is gone"  # its machine ended before this one heard why
            if isinstance(error, ChildFailedError):
                rank, failure = error.get_first_failure()
                code = failure.exitcode
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                why = f"rank {rank} of {options.world} ended by {how}"
            sys.stderr.write(f"{why}: all ranks were ended\n")
            return EXIT_AWAY
    return int(next(iter(codes.values())))  # each has rank 0's


def check_devices(options: WorkerOptions) -> None:
    """Refuse what this machine has not.

    Raises:
        SearchError: one device is named, or there are fewer than that.
    """
    device, count = options.device or default_device(), options.devices
    if options.world == 1:
        return
    if ":" in device:
        raise SearchError(f"--device {device} is one device, and --devices says {count}: leave --device out")
    if device.startswith("cuda"):
        import torch

        if torch.cuda.device_count() < count:
            raise SearchError(
                f"{count} devices for a trial: there are {torch.cuda.device_count()} CUDA devices here; give fewer, or "
                "hide them by CUDA_VISIBLE_DEVICES= to train in as many processes"
            )


def _stop_ranks_on_signals(folder: Path) -> StopEvent:
    """Return the stop event of this worker; a stop, and the end of its fleet, reach the ranks as SIGTERM."""

    def kill() -> None:  # the ranks end with this process
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(EXIT_INTERRUPTED)

    stop = stop_on_signals(kill=kill)
    fleet = os.environ.get("HPSEARCH_FLEET_PID")
    gone = watch_fleet(int(fleet)) if fleet else lambda: False
    threading.Thread(target=_look_after, args=(stop, gone, folder), daemon=True).start()
    return stop


def _look_after(stop: StopEvent, fleet_gone: Callable[[], bool], folder: Path) -> None:
    """Tell the ranks to go once this process is, and end those that do not end after one of them has died."""
    ranks: dict[int, BaseProcess] = {}
    died = math.inf
    while True:
        time.sleep(_LOOK)  # a parent's end wakes nobody
        ranks |= {rank.pid: rank for rank in multiprocessing.active_children() if rank.pid is not None}
        go = stop.is_set() or fleet_gone()
        if go and not ranks:  # it waits for the ranks of other machines, and holds nothing
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(EXIT_DRAINED)
        if any(rank.exitcode for rank in ranks.values()):
            died = min(died, time.monotonic())
        for pid, rank in ranks.items():
            if rank.is_alive() and (go or time.monotonic() > died + _ENDING):  # again: one may only be starting
                os.kill(pid, signal.SIGKILL if time.monotonic() > died + _ENDING else signal.SIGTERM)


def _be_rank(bind: Callable[[], None], name: str, options: WorkerOptions, place: Path | None) -> int:
    """Be one of the ranks; rank 0's exit code is the worker's."""
    bind()
    import torch

    from hpsearch.objectives.training.ranks import RankLostError, joined
    from hpsearch.search.worker.join import join_study
    from hpsearch.search.worker.ranks import dismiss, follow

    exit_on_signals(signal.SIGTERM, signal.SIGINT)
    torch.set_num_threads(max(1, torch.get_num_threads() // options.devices))
    device = options.device or default_device()
    if device.startswith("cuda"):
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    options = options.model_copy(update={"device": device})
    with joined(device=device, timeout=options.collective_timeout or options.lease / 2, place=place) as ranks:
        if not ranks.first:
            ranks.told_to_go = stop_worker_on_signals().is_set
            try:
                return follow(ranks, device=device)
            except RankLostError:  # rank 0 may be stuck: the launcher ends it
                sys.exit(EXIT_AWAY)
        code = report_errors(lambda: join_study(name, options))
        if code == EXIT_AWAY:  # one of the others may be stuck: the launcher ends them all
            sys.exit(code)
        try:
            dismiss(ranks, code)
        except RankLostError:
            sys.exit(EXIT_AWAY)
        return code
