"""The printed program with a real Ray cluster: killed workers and stopped workers."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.search.launch.site import Site

pytestmark = [
    pytest.mark.soak,
    pytest.mark.xdist_group("ray"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install ray"),
]


class Driver:
    """The running program. Without an address, Ray starts a cluster for it on this machine."""

    def __init__(self, site: Site, name: str, trials: int, log: Path, *, workers: int = 2, address: str = "") -> None:
        site.create(name, trials)
        program = site("fleet", "print", "ray", name, *("--workers", str(workers), "--cpus-per-worker", "1"),
                       *("--memory", "1G", "--grace", "30"))  # fmt: skip
        self.log = log
        environment = {
            **os.environ,
            **site.environment,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "STEP_SECONDS": "0.5",
            **({"RAY_ADDRESS": address} if address else {}),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-"],
            stdin=subprocess.PIPE,
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=site.folder,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(program)
        self.process.stdin.close()

    def actors(self) -> list[psutil.Process]:
        below = psutil.Process(self.process.pid).children(recursive=True)
        return [one for one in below if "ray::Worker" in " ".join(one.cmdline())]

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + 240
        while not condition():
            assert time.monotonic() < end, f"waited in vain for {what}\n{self.log.read_text()[-5000:]}"
            time.sleep(0.5)  # until a condition holds

    def ended(self) -> bool:
        return self.process.poll() is not None

    def close(self) -> None:
        """End it and its cluster, which is a child process."""
        below = psutil.Process(self.process.pid).children(recursive=True) if not self.ended() else []
        for one in below:
            one.kill()
        self.process.kill()
        self.process.wait()


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_killed_workers_restart_and_stopped_workers_save(site: Site, tmp_path: Path, how: str) -> None:
    driver = Driver(site, how, 8, tmp_path / "log")
    try:
        driver.wait(lambda: site.states(how).count("RUNNING") == 2, "both workers to train")
        if how == "killed":
            driver.actors()[0].kill()
            driver.wait(driver.ended, "the program to end")
            assert driver.process.returncode == 0, driver.log.read_text()
            assert site.states(how) == ["COMPLETE"] * 8
            assert "hpsearch: worker lost" in driver.log.read_text()
        else:
            driver.process.send_signal(signal.SIGTERM)
            driver.wait(driver.ended, "the program to end")
            assert driver.process.returncode == 143, driver.log.read_text()
            assert "RUNNING" not in site.states(how), "each trial was given back"
            assert site.states(how).count("WAITING") == 2
    finally:
        driver.close()


@pytest.fixture
def nodes(site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start a head without cores and three nodes with one core each, in the environment for workers."""
    monkeypatch.delitem(sys.modules, "IPython", raising=False)  # Ray imports it if it is there, and the suite hides it
    from ray.cluster_utils import Cluster

    for name, value in {**site.environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("STEP_SECONDS", "0.5")
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "300")  # for busy machines
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(3):
            cluster.add_node(num_cpus=1, memory=2 << 30)
        yield cluster
    finally:
        cluster.shutdown()


def workers_of(node: Any) -> list[psutil.Process]:
    """Return the workers on a node."""
    [raylet] = [info.process.pid for info in node.all_processes["raylet"]]
    below = psutil.Process(raylet).children(recursive=True)
    return [one for one in below if "ray::Worker" in " ".join(one.cmdline())]


def test_a_lost_node_costs_no_trial(site: Site, tmp_path: Path, nodes: Any) -> None:
    driver = Driver(site, "nodes", 12, tmp_path / "log", workers=3, address=nodes.address)
    try:
        driver.wait(lambda: site.states("nodes").count("RUNNING") == 3, "all workers to train")
        lost = next(node for node in nodes.worker_nodes if workers_of(node))
        for process in workers_of(lost):  # kill it with its node, as if the machine were lost
            process.kill()
        nodes.remove_node(lost, allow_graceful=False)
        driver.wait(driver.ended, "the program to end")
        assert driver.process.returncode == 0, driver.log.read_text()
        assert site.states("nodes") == ["COMPLETE"] * 12
        assert site.values("nodes") == site.undisturbed(12)
    finally:
        driver.close()
