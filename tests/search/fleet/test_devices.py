"""The devices of a worker, the rendezvous of its processes, and errors before they start."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from hpsearch.search.errors import SearchError
from hpsearch.search.fleet.cores_and_gpus import assign_gpus, count_gpu_workers
from hpsearch.search.fleet.rank_launcher import _describe_exit, _supervise_ranks, check_devices, find_rendezvous
from hpsearch.search.process.signals import StopEvent
from hpsearch.search.worker.options import WorkerOptions


def test_workers_with_several_devices_have_different_gpus() -> None:
    four = ["0", "1", "2", "3"]
    assert [assign_gpus(index, four, 2) for index in range(3)] == [["0", "1"], ["2", "3"], ["0", "1"]]
    assert [assign_gpus(index, four, 1) for index in range(5)] == [["0"], ["1"], ["2"], ["3"], ["0"]]
    assert assign_gpus(1, four[:3], 2) == ["0", "1"]
    assert count_gpu_workers(four, workers_per_gpu=1, gpus_per_trial=2) == 2
    assert count_gpu_workers(four, workers_per_gpu=3, gpus_per_trial=1) == 12


def test_the_end_of_a_rank_by_nccl_names_its_usual_cause() -> None:
    assert _describe_exit(3, "cuda") == "ended with exit code 3"
    assert _describe_exit(-9, "cuda") == "was ended by SIGKILL"
    assert _describe_exit(-6, "cpu") == "was ended by SIGABRT"
    assert _describe_exit(-6, "cuda") == (
        "was ended by SIGABRT, as by NCCL after --collective-timeout (see the line with 'Watchdog caught collective "
        "operation')"
    )


def test_machines_connect_to_the_given_address(tmp_path: Path) -> None:
    alone = find_rendezvous(1, {"MASTER_ADDR": "a", "MASTER_PORT": "1"}, tmp_path)
    assert (alone.endpoint, alone.file) == (str(tmp_path / "launcher"), tmp_path / "ranks")
    rendezvous = find_rendezvous(2, {"MASTER_ADDR": "a", "MASTER_PORT": "1"}, tmp_path)
    assert (rendezvous.endpoint, rendezvous.local_addr, rendezvous.file) == ("a:1", None, None)
    assert rendezvous == find_rendezvous(2, {"MASTER_ADDR": "a", "MASTER_PORT": "1"}, tmp_path / "another")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, ["--nodes 2", "MASTER_ADDR", "srun"]),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "x"}, ["MASTER_PORT", "'x'"]),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "0"}, ["MASTER_PORT", "65535"]),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "99999"}, ["MASTER_PORT", "65535"]),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a", "SLURM_NNODES": "3"}, ["--nodes is 2", "--nodes 3"]),
    ],
)
def test_machines_without_an_address_are_an_error(
    environment: dict[str, str], words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(SearchError) as error:
        find_rendezvous(2, environment, tmp_path)
    assert all(word in str(error.value) for word in words), error.value


def test_more_devices_than_available_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    check_devices(WorkerOptions(device="cpu", devices=8))
    check_devices(WorkerOptions(device="cuda:1"))
    with pytest.raises(SearchError, match="--device cuda:1 selects one device, but each trial needs"):
        check_devices(WorkerOptions(device="cuda:1", devices=2))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(SearchError, match="--devices 2 needs 2 CUDA devices, but this machine has 1"):
        check_devices(WorkerOptions(device="cuda", devices=2))
    with pytest.raises(SearchError, match="--workers-per-gpu 1"):
        count_gpu_workers(["0"], workers_per_gpu=1, gpus_per_trial=2)
    with pytest.raises(SearchError, match="--nodes must be at least 1, not 0"):
        WorkerOptions(nodes=0)


@pytest.mark.parametrize("option", ["collective_timeout", "barrier_timeout"])
def test_a_timeout_that_overflows_in_torch_is_rejected(option: str) -> None:
    flag = f"--{option.replace('_', '-')}"
    with pytest.raises(SearchError, match=f"{flag} must be at most 31536000, not 1e\\+300"):
        WorkerOptions.model_validate({option: 1e300})


@pytest.mark.soak
def test_the_cause_of_an_error_before_the_training_is_printed(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "hpsearch", "worker", "--study", "s", "--devices", "2"]
    environment = {**os.environ, "HPSEARCH_HOME": str(tmp_path), "GLOO_SOCKET_IFNAME": "missing0"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert re.search(
        r"^(\[rank1\]: )?hpsearch: rank \d failed: RankLostError: the ranks did not connect: .*missing0",
        ended.stderr,
        re.M,
    )
    assert "Traceback" not in ended.stderr


def test_a_fleet_passes_devices_to_its_workers() -> None:
    environment = WorkerOptions(devices=2, collective_timeout=5.0, nodes=1).environment()
    assert (environment["HPSEARCH_DEVICES"], environment["HPSEARCH_COLLECTIVE_TIMEOUT"]) == ("2", "5.0")
    assert "HPSEARCH_DEVICES" not in WorkerOptions().environment()


def _ignore_sigterm(started: Connection) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    started.send(True)
    time.sleep(1000)


def test_ranks_that_do_not_exit_are_killed_after_the_grace_period_if_the_fleet_has_ended(tmp_path: Path) -> None:
    """For example in a long step, or while one rank waits for the others."""
    received, started = multiprocessing.Pipe(duplex=False)
    rank = multiprocessing.get_context("fork").Process(target=_ignore_sigterm, args=(started,))
    rank.start()
    received.recv()
    stop, end = StopEvent(), threading.Event()
    supervision = threading.Thread(target=_supervise_ranks, args=(stop, lambda: True, 0.5, tmp_path, end))
    supervision.start()
    try:
        rank.join(60)
        assert rank.exitcode == -signal.SIGKILL
    finally:
        end.set()
        supervision.join()
        rank.kill()
