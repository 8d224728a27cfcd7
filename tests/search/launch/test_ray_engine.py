"""The printed program with a real Ray cluster: killed workers, lost nodes, exhausted memory and stopped workers."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.search.launch.memory import can_limit_memory
from tests.search.launch.site import Site

pytestmark = [
    pytest.mark.soak,
    pytest.mark.xdist_group("ray"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install ray"),
]


class Driver:
    """The running program. Without an address, Ray starts a cluster for it on this machine."""

    def __init__(self, site: Site, name: str, log: Path, *, workers: int = 2, address: str = "") -> None:
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
            stdout=log.open("ab"),
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

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = 240) -> None:
        end = time.monotonic() + seconds
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
    site.create(how, 8)
    driver = Driver(site, how, tmp_path / "log")
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
def nodes(site: Site, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Start a head without cores and three nodes with one core each, in the environment for workers.

    The parameter has the times of the objective.
    """
    monkeypatch.delitem(sys.modules, "IPython", raising=False)  # Ray imports it if it is there, and the suite hides it
    from ray.cluster_utils import Cluster

    paces = getattr(request, "param", {"STEP_SECONDS": "0.5"})
    for name, value in {**site.environment, **paces, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "300")  # for busy machines
    monkeypatch.setenv("RAY_worker_niceness", "0")  # Ray's 15 leaves a worker little of a busy machine
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(3):
            add_node(cluster)
        yield cluster
    finally:
        cluster.shutdown()


def add_node(cluster: Any) -> None:
    cluster.add_node(num_cpus=1, memory=2 << 30)


def workers_of(node: Any) -> list[psutil.Process]:
    """Return the workers on a node."""
    [raylet] = [info.process.pid for info in node.all_processes["raylet"]]
    below = psutil.Process(raylet).children(recursive=True)
    return [one for one in below if "ray::Worker" in " ".join(one.cmdline())]


def remove_node(cluster: Any, *, grace: float = 0.0) -> list[psutil.Process]:
    """End a node with a worker, and its processes, as if the machine were lost; return its workers.

    Args:
        cluster: the cluster.
        grace: seconds from SIGTERM to the node's daemon until SIGKILL, as before a preemption; 0 kills at once.
    """
    node = next(node for node in cluster.worker_nodes if workers_of(node))
    workers = workers_of(node)
    if grace:
        [raylet] = [info.process for info in node.all_processes["raylet"]]
        raylet.terminate()
        with suppress(subprocess.TimeoutExpired):
            raylet.wait(grace)
    for worker in workers:
        with suppress(psutil.NoSuchProcess):
            worker.kill()
    cluster.remove_node(node, allow_graceful=False)
    return workers


def test_a_lost_node_costs_no_trial(site: Site, tmp_path: Path, nodes: Any) -> None:
    site.create("nodes", 12)
    driver = Driver(site, "nodes", tmp_path / "log", workers=3, address=nodes.address)
    try:
        driver.wait(lambda: site.states("nodes").count("RUNNING") == 3, "all workers to train")
        remove_node(nodes)
        driver.wait(driver.ended, "the program to end")
        assert driver.process.returncode == 0, driver.log.read_text()
        assert site.states("nodes") == ["COMPLETE"] * 12
        assert site.values("nodes") == site.undisturbed(12)
    finally:
        driver.close()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("nodes", [{"STEP_SECONDS": "5", "START_SECONDS": "30"}], indirect=True)
def test_disturbances_of_slow_starts_cost_no_trial_and_the_fleet_has_its_size_again(
    site: Site, tmp_path: Path, nodes: Any
) -> None:
    """Workers need 30 s to start, and a preempted node is killed 5 s after SIGTERM. Other nodes replace lost ones."""

    def start() -> Driver:
        return Driver(site, "slow", tmp_path / "log", workers=3, address=nodes.address)

    def kill_worker() -> list[str]:
        return site.kill_worker("slow")

    def exhaust_memory() -> list[str]:
        return site.exhaust_memory("slow", limit=100 << 20)

    def lose_node(grace: float = 0.0) -> list[str]:
        names = {each["pid"]: name for name, each in site.list_active_workers("slow").items()}
        workers = remove_node(nodes, grace=grace)
        add_node(nodes)
        return [names[worker.pid] for worker in workers if worker.pid in names]

    def preempt_node() -> list[str]:
        return lose_node(grace=5)

    site.create("slow", 12)
    driver = start()
    try:
        site.wait_for_fleet("slow", 3)
        for disturb in (lose_node, kill_worker, preempt_node):  # most workers still start
            site.wait_for_fleet("slow", 3, without=disturb(), after=disturb.__name__)
        driver.wait(lambda: any(epochs for _, epochs, _ in site.values("slow").values()), "an epoch to be reported")
        for disturb in (*([exhaust_memory] if can_limit_memory() else []), kill_worker, preempt_node):
            site.wait_for_fleet("slow", 3, without=disturb(), after=disturb.__name__)
        stopped = site.list_active_workers("slow")
        driver.process.send_signal(signal.SIGTERM)
        driver.wait(driver.ended, "the program to end")
        assert driver.process.returncode == 143, driver.log.read_text()
        driver = start()
        site.wait_for_fleet("slow", 3, without=stopped, after="another start of the program")
        driver.wait(driver.ended, "the program to end", 900)
        assert driver.process.returncode == 0, driver.log.read_text()
    finally:
        driver.close()
    assert site.states("slow") == ["COMPLETE"] * 12
    assert site.values("slow") == site.undisturbed(12)
