"""The number of available cores, which an engine can limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpsearch.search.fleet import cores_and_gpus
from hpsearch.search.fleet.cores_and_gpus import visible_gpus


def cgroup(folder: Path, mine: str, files: dict[str, str]) -> float | None:
    (folder / "mine").write_text(mine)
    for name, text in files.items():
        path = folder / "mounted" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return cores_and_gpus.read_cgroup_cpu_limit(folder / "mine", folder / "mounted")


@pytest.mark.parametrize(
    ("mine", "files", "limit"),
    [
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2.0),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {}, None),
        ("0::/job/step\n", {"job/cpu.max": "150000 100000\n", "job/step/cpu.max": "max 100000\n"}, 1.5),
        ("0::/job/step\n", {"job/cpu.max": "100000 100000\n", "job/step/cpu.max": "400000 100000\n"}, 1.0),
        ("0::/of/the/host\n", {"cpu.max": "300000 100000\n"}, 3.0),
        ("4:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "50000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, 0.5),
        ("4:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, None),
        ("4:cpuset:/a\n0::/\n", {"cpu.max": "nonsense"}, None),
        ("", {}, None),
    ],
)
def test_the_limit_of_a_cgroup(tmp_path: Path, mine: str, files: dict[str, str], limit: float | None) -> None:
    assert cgroup(tmp_path, mine, files) == limit


@pytest.mark.parametrize(("limit", "found"), [(None, 8), (2.0, 2), (2.9, 2), (0.5, 1), (64.0, 8)])
def test_cores_are_the_minimum_of_affinity_and_limit(
    monkeypatch: pytest.MonkeyPatch, limit: float | None, found: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(cores_and_gpus, "read_cgroup_cpu_limit", lambda: limit)
    assert cores_and_gpus.count_cores() == found
    assert cores_and_gpus.thread_environment(2)["OMP_NUM_THREADS"] == str(max(1, found // 2))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_the_affinity_set_by_an_engine_is_used() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert cores_and_gpus.count_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("given", "found"), [("", []), ("3", ["3"]), ("2, 5", ["2", "5"]), ("GPU-8a,MIG-1/2/3", ["GPU-8a", "MIG-1/2/3"])]
)
def test_only_the_gpus_of_an_engine_are_divided(monkeypatch: pytest.MonkeyPatch, given: str, found: list[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert visible_gpus() == found
