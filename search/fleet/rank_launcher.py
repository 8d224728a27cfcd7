"""Workers on several devices: launch the ranks, find their rendezvous, and forward signals to the ranks."""

from __future__ import annotations

import fcntl
import logging
import math
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from hpsearch.objectives.private_folders import find_safe_temporary_folder
from hpsearch.objectives.training.data.loader import make_parent_death_hook
from hpsearch.search.console import prefix_output
from hpsearch.search.error_lines import report_errors
from hpsearch.search.errors import SearchError
from hpsearch.search.fleet.fork_server import can_fork
from hpsearch.search.process.children import end_session, make_fleet_watcher
from hpsearch.search.process.exits import EXIT_DRAINED, EXIT_INTERRUPTED, EXIT_UNAVAILABLE, report_exit
from hpsearch.search.process.signals import StopEvent, exit_on_signals, stop_on_signals, stop_worker_on_signals
from hpsearch.search.worker.identity import get_default_device
from hpsearch.search.worker.options import WorkerOptions
from hpsearch.storage.display import escape_line

_LAST_PORT = 65_535
_FIRST_PORT, _PORTS = 20_000, 10_000  # the port of a Slurm job depends on its number, so that jobs seldom share one


@dataclass(frozen=True)
class Rendezvous:
    """The rendezvous of the processes of a worker, in the terms of torchrun.

    Attributes:
        endpoint: ``HOST:PORT``; for a worker on one machine, a file that other users cannot access.
        run_id: id that distinguishes the processes of this worker from those of other workers.
        local_addr: address at which other machines reach this machine; None lets torch look up the address.
        file: file of the process group's store for a worker on one machine; None for a worker on several machines.
    """

    endpoint: str
    run_id: str
    local_addr: str | None = None
    file: Path | None = None


def find_rendezvous(nodes: int, environment: Mapping[str, str], folder: Path) -> Rendezvous:
    """Return the rendezvous of a worker.

    A worker on several machines uses `MASTER_ADDR` and `MASTER_PORT`, as torchrun does. If these are not set, it uses
    the first node of the Slurm job.

    Args:
        nodes: number of machines of the worker.
        environment: environment with the variables of torchrun and Slurm.
        folder: private folder for the files of a rendezvous on one machine.

    Raises:
        SearchError: the variables are missing or invalid, or the Slurm job does not have `nodes` machines.
    """
    if nodes == 1:
        return Rendezvous(str(folder / "launcher"), "worker", "127.0.0.1", folder / "ranks")
    given = environment.get
    if (host := given("MASTER_ADDR")) and (port := given("MASTER_PORT")):
        if not (port.isdigit() and 0 < int(port) <= _LAST_PORT):
            raise SearchError(f"MASTER_PORT must be in [1, {_LAST_PORT}], not {port!r}")
        return Rendezvous(f"{host}:{port}", given("TORCHELASTIC_RUN_ID") or f"hpsearch-{port}")
    if (job := given("SLURM_JOB_ID")) and (hosts := given("SLURM_JOB_NODELIST")):
        if (has := given("SLURM_NNODES", str(nodes))) != str(nodes):
            raise SearchError(f"--nodes is {nodes}, but the Slurm job has {has} nodes; give --nodes {has}")
        step = given("SLURM_STEP_ID", "0")
        port = str(_FIRST_PORT + int(job) % _PORTS)
        return Rendezvous(f"{_find_first_host(hosts)}:{port}", f"hpsearch-{job}.{step}")
    raise SearchError(
        f"--nodes {nodes} needs the environment variables MASTER_ADDR and MASTER_PORT; set them to the same address "
        "and free port on all machines, or start the worker with Slurm's srun"
    )


def _find_first_host(hosts: str) -> str:
    """Return the first host name in a Slurm host list such as ``node[01-08]``."""
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        raise SearchError("--nodes under Slurm needs scontrol, which is not on PATH; set MASTER_ADDR and MASTER_PORT")
    found = subprocess.run([scontrol, "show", "hostnames", hosts], capture_output=True, text=True, check=False)
    if found.returncode or not found.stdout.split():
        raise SearchError(f"SLURM_JOB_NODELIST is {hosts!r}, which scontrol rejects; set MASTER_ADDR and MASTER_PORT")
    return found.stdout.split()[0]


_PREFIX = f"hpsearch-ranks-{platform.node()}-"  # a home may be shared by machines that do not share locks
_MARKER = ".hpsearch-ranks"  # a file in these folders


@contextmanager
def make_private_folder() -> Iterator[Path]:
    """Create a private folder for this process and its children, and remove the folders of this user's dead processes.

    Each live process holds a lock on its folder. The operating system releases the lock when the process is killed. A
    PID could not identify dead processes reliably, because PIDs are reused.

    Raises:
        ObjectiveError: other users can replace folders in the temporary folder, and the home belongs to another user.
    """
    parent = (
        find_safe_temporary_folder()
    )  # the launcher unpickles the state of the rendezvous from a file in the folder
    _remove_stale_folders(parent)
    # Hidden from the clean-up of others until it is locked.
    made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))
    (made / _MARKER).touch()
    held = os.open(made, os.O_RDONLY)
    with suppress(OSError):  # NFS locks no folders: nothing removes the folder of a killed process in a home there
        fcntl.flock(held, fcntl.LOCK_EX)
    folder = made.rename(made.with_name(made.name.removeprefix(".")))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _remove_stale_folders(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # its process is alive, or another launcher has just removed it
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                status = os.fstat(held)
                # Others can give the name to a folder of this user, but cannot write into a private one.
                is_own = status.st_uid == os.getuid() and not status.st_mode & 0o077
                if is_own and (folder / _MARKER).exists():
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(held)


log = logging.getLogger(__name__)

_RANK_SHUTDOWN_SECONDS = 5  # time in which the other ranks must exit after a rank has died
_OWN_SAFE_PATH = "hpsearch"  # a value of PYTHONSAFEPATH, by which interpreters import no modules of the working folder
_POLL_SECONDS = 0.2  # interval between two checks for a stop request


def join_study_on_devices(name: str, options: WorkerOptions) -> int:
    """Run a worker of study `name` on `options.devices` devices of this machine; return rank 0's exit code.

    If `options.nodes` is larger than 1, the function must be called on each machine.

    If a rank dies, the function ends all ranks and returns `EXIT_UNAVAILABLE`, after which engines restart the worker.
    Any worker may then resume the trial.

    Raises:
        SearchError: there are too few devices, or the address of the rendezvous is missing.
    """
    check_devices(options)
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for logger in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):  # verbose about dead ranks
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    fork = can_fork()
    with make_private_folder() as folder, _stop_ranks_on_signals(folder, options.grace) as stop:
        place = find_rendezvous(options.nodes, os.environ, folder)
        if place.file is not None:  # otherwise the launcher opens a port on all addresses of this machine
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
            max_restarts=0,  # the engine or the fleet restarts the worker and counts the restarts
            start_method="fork" if fork else "spawn",
            signals_to_handle="SIGQUIT",  # SIGTERM and SIGINT are forwarded, so that ranks can save first
            shutdown_timeout=_RANK_SHUTDOWN_SECONDS,
            logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
        )
        os.environ.setdefault("PYTHONSAFEPATH", _OWN_SAFE_PATH)  # for spawned ranks
        tempfile.tempdir = str(folder)  # the launcher unpickles the errors of ranks from files with predictable names
        try:
            codes = elastic_launch(config, _run_rank)(make_parent_death_hook(), name, options, place.file)
        except (ChildFailedError, RendezvousConnectionError) as error:
            if stop.is_set():
                return EXIT_DRAINED
            why = f"connection to rendezvous {place.endpoint} lost"  # the rank's machine ended before it sent the cause
            if isinstance(error, ChildFailedError):
                rank, failure = error.get_first_failure()
                how = _describe_exit(failure.exitcode, options.device or get_default_device())
                where = f" (see the lines that begin with [rank{rank}], if any)" if rank else ""
                why = f"rank {rank} of {options.world_size} {how}{where}"
            sys.stderr.write(f"{why}; all ranks were terminated\n")
            return EXIT_UNAVAILABLE
        finally:
            tempfile.tempdir = None
            end_session()
    return int(next(iter(codes.values())))  # all ranks return the code of rank 0


def _describe_exit(code: int, device: str) -> str:
    """Describe the end of a rank, with the usual cause of SIGABRT: its message is printed by another library."""
    if code >= 0:
        return f"ended with exit code {code}"
    how = f"was ended by {signal.Signals(-code).name}"
    if -code != signal.SIGABRT or not device.startswith("cuda"):
        return how
    return f"{how}, as by NCCL after --collective-timeout (see the line with 'Watchdog caught collective operation')"


def check_devices(options: WorkerOptions) -> None:
    """Check that the requested devices exist.

    Raises:
        SearchError: `--device` selects a single device, or the machine has fewer devices than requested.
    """
    device, count = options.device or get_default_device(), options.devices
    if options.world_size == 1:
        return
    if ":" in device:
        raise SearchError(
            f"--device {device} selects one device, but each trial needs {options.world_size} devices; remove --device"
        )
    if device.startswith("cuda"):
        import torch

        if torch.cuda.device_count() < count:
            raise SearchError(
                f"--devices {count} needs {count} CUDA devices, but this machine has {torch.cuda.device_count()}; give "
                f"a smaller number, or set CUDA_VISIBLE_DEVICES='' to train in {count} CPU processes"
            )


@contextmanager
def _stop_ranks_on_signals(folder: Path, grace: float) -> Iterator[StopEvent]:
    """Return a context with the stop event of this worker.

    In the context, the ranks get SIGTERM when the event is set or the fleet has ended. After the end of the fleet, they
    get SIGKILL after `grace` seconds.
    """

    def kill() -> None:  # ranks end with this process
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(EXIT_INTERRUPTED)

    stop = stop_on_signals(kill=kill)
    fleet = os.environ.get("HPSEARCH_FLEET_PID")
    has_fleet_ended = make_fleet_watcher(int(fleet)) if fleet else lambda: False
    end = threading.Event()
    arguments = (stop, has_fleet_ended, grace, folder, end)
    supervision = threading.Thread(target=_supervise_ranks, args=arguments, daemon=True)
    supervision.start()
    try:
        yield stop
    finally:
        end.set()  # later children of this process are no ranks
        supervision.join()


def _supervise_ranks(
    stop: StopEvent, has_fleet_ended: Callable[[], bool], grace: float, folder: Path, end: threading.Event
) -> None:
    """Forward a stop request to the ranks; after a rank has died or the fleet has ended, end those that do not exit."""
    ranks: dict[int, BaseProcess] = {}
    kill_at = math.inf
    while not end.wait(_POLL_SECONDS):  # polls, because the end of a parent sends no event
        # `active_children` would take exit statuses from torch's launcher, which fails without them.
        children: set[BaseProcess] = multiprocessing.process._children.copy()  # type: ignore[attr-defined]
        ranks |= {rank.pid: rank for rank in children if rank.pid is not None}
        is_fleet_gone = has_fleet_ended()
        should_stop = stop.is_set() or is_fleet_gone
        if should_stop and not ranks:  # still waiting for the ranks of other machines
            shutil.rmtree(folder, ignore_errors=True)
            report_exit(EXIT_DRAINED)
            os._exit(EXIT_DRAINED)
        codes = {pid: _peek_exit_code(rank) for pid, rank in ranks.items()}
        if any(codes.values()):
            kill_at = min(kill_at, time.monotonic() + _RANK_SHUTDOWN_SECONDS)
        if is_fleet_gone:
            kill_at = min(kill_at, time.monotonic() + grace)
        for pid, code in codes.items():
            is_overdue = time.monotonic() > kill_at
            if code is None and (should_stop or is_overdue):  # repeated, because a rank may only be starting
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if is_overdue else signal.SIGTERM)


def _peek_exit_code(rank: BaseProcess) -> int | None:
    """Return the exit code of a rank, and leave it to torch's launcher; None while the rank runs."""
    if rank.pid is None or not hasattr(os, "waitid"):  # macOS before Python 3.13
        return rank.exitcode
    try:
        status = os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # the launcher has taken it
        return rank.exitcode
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def _run_rank(bind: Callable[[], None], name: str, options: WorkerOptions, place: Path | None) -> int:
    """Run one rank and return its exit code. The exit code of rank 0 is that of the worker."""
    bind()
    if os.environ.get("PYTHONSAFEPATH") == _OWN_SAFE_PATH:  # programs that the objective starts may import such modules
        del os.environ["PYTHONSAFEPATH"]
    tempfile.tempdir = None  # for forked ranks: the launcher's folder is removed before they have ended
    from hpsearch.objectives.training.rank_errors import RankLostError

    if rank := int(os.environ["RANK"]):
        prefix_output(rank)
    try:
        return _join_as_rank(name, options, place)
    except Exception as error:  # torch's launcher prints no errors of ranks
        if not isinstance(error, RankLostError):
            traceback.print_exc()
        line = escape_line(f"{type(error).__name__}: {error}")
        sys.stderr.write(f"hpsearch: rank {rank} failed: {line}\n")
        sys.exit(EXIT_UNAVAILABLE)


def _join_as_rank(name: str, options: WorkerOptions, place: Path | None) -> int:
    import torch

    from hpsearch.objectives.training.rank_errors import RankLostError
    from hpsearch.objectives.training.ranks import init_process_group
    from hpsearch.search.worker.lifecycle import join_study, log_as_worker
    from hpsearch.search.worker.rank_jobs import run_follower_rank, stop_followers

    exit_on_signals(signal.SIGTERM, signal.SIGINT)
    torch.set_num_threads(max(1, torch.get_num_threads() // options.devices))
    device = options.device or get_default_device()
    if device.startswith("cuda"):
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    options = options.model_copy(update={"device": device})
    timeout = options.collective_timeout or options.lease / 2
    with init_process_group(
        device=device, timeout=timeout, barrier_timeout=options.barrier_timeout, store_path=place
    ) as ranks:
        if not ranks.is_rank_zero:
            log_as_worker()
            logging.getLogger("hpsearch").setLevel(logging.WARNING)  # rank 0 logs the course of the trial
            ranks.should_stop = stop_worker_on_signals().is_set
            try:
                return run_follower_rank(ranks, device=device)
            except RankLostError:  # rank 0 may hang; the launcher ends it
                sys.exit(EXIT_UNAVAILABLE)
        code = report_errors(lambda: join_study(name, options))
        if code == EXIT_UNAVAILABLE:  # another rank may hang; the launcher ends all
            sys.exit(code)
        try:
            stop_followers(ranks, code)
        except RankLostError:
            sys.exit(EXIT_UNAVAILABLE)
        return code
