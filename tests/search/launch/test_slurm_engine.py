"""The printed script under a real Slurm: preemption signals, lost nodes, and scancel."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

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


def submit(cluster: Cluster, site: Site, name: str, trials: int, *, step: str) -> str:
    site.create(name, trials)
    script = site("fleet", "print", "slurm", name, "--workers", "3", "--cpus-per-worker", "1", "--memory", "1G",
                  "--time", "1:00:00", "--grace", "30")  # fmt: skip
    job_id = cluster.run("sbatch", "--parsable", input=script, STEP_SECONDS=step, **site.environment)
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


def test_scancel_empties_the_queue(cluster: Cluster, site: Site) -> None:
    job = submit(cluster, site, "cancelled", 500, step="0.2")
    cluster.wait(lambda: sum(bool(v) for _, v, _ in site.values("cancelled").values()) >= 2, "workers to train")
    cluster.run("scancel", job)
    cluster.wait(lambda: not cluster.states(job), "the queue to be empty", 60)
    assert "exits with code 143" in cluster.logs("cancelled")
    assert "requeued after" not in cluster.logs("cancelled")
    assert site.states("cancelled").count("COMPLETE") < 500
