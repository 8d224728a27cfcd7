"""The printed script under a real Slurm: preemptions, killed workers, lost nodes, and scancel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.search.launch.memory import can_limit_memory
from tests.search.launch.site import Site
from tests.search.launch.slurm_cluster import Cluster, missing, slurm_cluster

pytestmark = [
    pytest.mark.soak,
    pytest.mark.xdist_group("slurm"),
    pytest.mark.skipif(bool(missing()), reason=f"no Slurm on this machine: {', '.join(missing())}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="a Slurm with a SlurmUser of its own is started by root"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


def submit(
    cluster: Cluster, site: Site, name: str, trials: int, *, step: str, start: str = "0", grace: str = "30"
) -> str:
    site.create(name, trials)
    script = site("fleet", "print", "slurm", name, "--workers", "3", "--cpus-per-worker", "1", "--memory", "1G",
                  "--time", "1:00:00", "--grace", grace)  # fmt: skip
    paces = {"STEP_SECONDS": step, "START_SECONDS": start}
    job_id = cluster.run("sbatch", "--parsable", input=script, **paces, **site.environment)
    cluster.wait(lambda: "RUNNING" in site.states(name), "a trial to be run")
    return job_id


def test_a_preemption_and_a_lost_node_cost_no_trial(cluster: Cluster, site: Site) -> None:
    job = submit(cluster, site, "slurm", 12, step="0.5")
    cluster.wait(lambda: set(cluster.states(job).values()) == {"RUNNING"}, "all tasks to run")
    cluster.wait(lambda: site.states("slurm").count("RUNNING") == 3, "all workers to train")
    cluster.run("scancel", "--signal=TERM", "--batch", f"{job}_1")  # the signal as --signal=B:TERM@ sends it
    cluster.wait(lambda: "requeued after exit code 143" in cluster.logs(), "the first task to be queued again")
    (lost,) = [name for name in ("n1", "n2", "n3") if cluster.run("squeue", "-h", "-j", f"{job}_3", "-o", "%N") == name]
    cluster.daemons[lost].kill()
    cluster.wait(lambda: not cluster.states(job), "the array to end", 400)
    assert site.states("slurm") == ["COMPLETE"] * 12
    assert site.values("slurm") == site.undisturbed(12)
    assert cluster.logs("slurm").count(" joins study slurm") == 5, "three tasks, of which two were started again"
    assert cluster.logs("slurm").count("hpsearch: requeued after") == 1, "Slurm itself saw to the lost node"
    cluster.start(lost, "slurmd", "-D", "-N", lost)


@pytest.mark.timeout(1800)
def test_disturbances_of_slow_starts_cost_no_trial_and_the_fleet_has_its_size_again(tmp_path: Path, site: Site) -> None:
    """Workers need 30 s to start, and a preempted one is killed 5 s after SIGTERM.

    Where memory is exhausted, the kernel kills the worker, because Slurm limits its cgroup to --memory.
    """
    limits_memory = can_limit_memory()
    (folder := tmp_path / "cluster").mkdir()
    with slurm_cluster(folder, kill_wait=5, slurmd_timeout=10, limits_memory=limits_memory) as cluster:
        job = submit(cluster, site, "slow", 12, step="5", start="30", grace="10")
        site.wait_for_fleet("slow", 3)

        def kill_worker() -> list[str]:
            return site.kill_worker("slow")

        def exhaust_memory() -> list[str]:
            return site.exhaust_memory("slow")

        def preempt_node() -> list[str]:
            node, names = find_busy_node(cluster, site, job)
            cluster.run("sbatch", "--partition=urgent", f"--nodelist={node}", "--exclusive", "--wrap=sleep 5")
            return names

        def lose_node() -> list[str]:
            node, names = find_busy_node(cluster, site, job)
            cluster.lose(node)
            return names

        for disturb in (lose_node, kill_worker, preempt_node):  # most workers still start
            site.wait_for_fleet("slow", 3, without=disturb(), after=disturb.__name__)
        cluster.wait(
            lambda: any(epochs for _, epochs, _ in site.values("slow").values()), "an epoch to be reported", 600
        )
        for disturb in (*([exhaust_memory] if limits_memory else []), kill_worker, preempt_node):
            site.wait_for_fleet("slow", 3, without=disturb(), after=disturb.__name__)
        cluster.wait(lambda: not cluster.states(job), "the array to end", 900)
    assert ("oom-kill event" in cluster.logs("slow")) == limits_memory
    assert site.states("slow") == ["COMPLETE"] * 12
    assert site.values("slow") == site.undisturbed(12)


def find_busy_node(cluster: Cluster, site: Site, job: str) -> tuple[str, list[str]]:
    """Return a node with a worker, and the names of its workers."""
    lines = cluster.run("squeue", "-h", "-r", "-j", job, "-t", "R", "-o", "%K %N").splitlines()
    nodes = dict(line.split() for line in lines)
    of_task = {each["job"].rpartition("_")[2]: name for name, each in site.list_active_workers("slow").items()}
    node = nodes[next(iter(of_task))]
    return node, [name for task, name in of_task.items() if nodes.get(task) == node]


def test_scancel_empties_the_queue(cluster: Cluster, site: Site) -> None:
    job = submit(cluster, site, "cancelled", 500, step="0.2")
    cluster.wait(lambda: sum(bool(v) for _, v, _ in site.values("cancelled").values()) >= 2, "workers to train")
    cluster.run("scancel", job)
    cluster.wait(lambda: not cluster.states(job), "the queue to be empty", 60)
    assert "exits with code 143" in cluster.logs("cancelled")
    assert "requeued after" not in cluster.logs("cancelled")
    assert site.states("cancelled").count("COMPLETE") < 500
