"""One worker on several devices: torch's elastic launcher starts a process for each, and ends all where one dies."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from hpsearch.objectives.training.data.child import ending_with_parent
from hpsearch.search.entry import EXIT_AWAY, EXIT_DRAINED, EXIT_INTERRUPTED, telling_mistakes
from hpsearch.search.errors import SearchError
from hpsearch.search.fleet.forking import can_fork
from hpsearch.search.fleet.private_folder import private_folder
from hpsearch.search.fleet.rendezvous import rendezvous
from hpsearch.search.worker.identity import default_device
from hpsearch.search.worker.options import WorkerOptions
from hpsearch.search.worker.orphan import watch_fleet

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
        told = _passing_on_signals(folder)
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
            rdzv_configs=place.options,
            local_addr=place.local_addr,
            max_restarts=0,  # whoever started this worker starts it again, and counts how often
            start_method="fork" if fork else "spawn",
            signals_to_handle="SIGQUIT",  # the others are passed on, and ranks leave in their own time
            shutdown_timeout=_ENDING,
            logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
        )
        try:
            codes = elastic_launch(config, _be_rank)(ending_with_parent(), name, options, place.file)
        except ChildFailedError as error:
            if told:
                return EXIT_DRAINED
            rank, failure = error.get_first_failure()
            how = signal.Signals(-failure.exitcode).name if failure.exitcode < 0 else f"exit code {failure.exitcode}"
            sys.stderr.write(f"rank {rank} of {options.world} ended by {how}: all ranks were ended\n")
            return EXIT_AWAY
        except RendezvousConnectionError:  # the machine that holds the meeting ended before this one heard why
            if told:
                return EXIT_DRAINED
            sys.stderr.write(f"the machines' meeting at {place.endpoint} is gone: all ranks were ended\n")
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


def _passing_on_signals(folder: Path) -> list[int]:
    """Let SIGTERM and SIGINT reach the ranks as SIGTERM, and so the end of the fleet that started this worker.

    Args:
        folder: to be removed where this process ends at once.

    Returns:
        The signals that came so far; it grows.
    """
    told: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        told.append(number)
        if told.count(signal.SIGINT) > 1:  # a person's second one; the ranks end with this process
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(EXIT_INTERRUPTED)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, on_signal)
    fleet = os.environ.get("HPSEARCH_FLEET_PID")
    gone = watch_fleet(int(fleet)) if fleet else lambda: False
    threading.Thread(target=_look_after, args=(told, gone, folder), daemon=True).start()
    return told


def _look_after(told: list[int], fleet_gone: Callable[[], bool], folder: Path) -> None:
    """Tell the ranks to go once this process is, and end those that do not end after one of them has died."""
    ranks: dict[int, BaseProcess] = {}
    died = math.inf
    while True:
        time.sleep(_LOOK)  # a parent's end wakes nobody
        ranks |= {rank.pid: rank for rank in multiprocessing.active_children() if rank.pid is not None}
        go = bool(told) or fleet_gone()
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
    from hpsearch.search.worker.ranks import dismiss, follow, hear
    from hpsearch.search.worker.signals import stop_on_signals

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    torch.set_num_threads(max(1, torch.get_num_threads() // options.devices))
    device = options.device or default_device()
    if device.startswith("cuda"):
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    options = replace(options, device=device)
    with joined(device=device, timeout=options.collective_timeout or options.lease / 2, place=place) as ranks:
        if not ranks.first:
            stop = stop_on_signals()
            hear(ranks, told=stop.is_set, leave=lambda: None)
            try:
                return follow(ranks, device=device)
            except RankLostError:  # rank 0 may be stuck: the launcher ends it
                sys.exit(EXIT_AWAY)
        code = telling_mistakes(lambda: join_study(name, options))
        if code == EXIT_AWAY:  # one of the others may be stuck: the launcher ends them all
            sys.exit(code)
        try:
            dismiss(ranks, code)
        except RankLostError:
            sys.exit(EXIT_AWAY)
        return code
