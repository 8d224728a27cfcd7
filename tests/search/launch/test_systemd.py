"""The unit for systemd: validation by systemd itself, restarts and quoting."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpsearch.search.launch import launch
from tests.search.launch.support import HOME, URL, text


def settings(unit: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"^([A-Za-z]+)=(.*)$", unit, re.MULTILINE):
        found.setdefault(name, []).append(value)
    return found


def test_the_unit_restarts_for_two_exit_codes_and_after_a_death_by_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_worker_user", lambda: "someone")
    found = settings(text(engine="systemd", grace=90, cpus=3, memory="6G", folder="/srv/100% mine"))
    assert found["Restart"] == ["on-abnormal"]
    assert found["RestartForceExitStatus"] == ["1 143 SIGTERM"]
    assert found["RestartPreventExitStatus"] == ["0 2 3"]
    assert found["SuccessExitStatus"] == ["143"]
    assert found["KillMode"] == ["mixed"]
    assert found["TimeoutStopSec"] == ["105"]
    assert found["CPUQuota"] == ["300%"]
    assert found["MemoryMax"] == ["6G"]
    assert found["User"] == ["someone"]
    assert found["WorkingDirectory"] == ["/srv/100%% mine"]
    assert found["EnvironmentFile"] == ["-/etc/hpsearch/worker.env"]
    assert found["ExecStart"] == [f'"{sys.executable}" "-P" "-m" "hpsearch" "worker" "--study" "wine" "--grace" "85"']
    assert "CUDA_VISIBLE_DEVICES=" in found["Environment"]


def test_the_unit_does_not_run_workers_as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert settings(text(engine="systemd"))["User"] == ["hpsearch"]


@pytest.mark.parametrize(
    ("gpus", "devices"),
    [(1.0, ["0", "1", "2", "3"]), (2.0, ["0,1", "2,3", "4,5", "6,7"]), (0.5, ["0", "0", "1", "1"])],
)
def test_an_instance_has_its_own_gpu_or_a_share_of_one(gpus: float, devices: list[str]) -> None:
    (line,) = settings(text(engine="systemd", gpus=gpus, command=("echo",)))["ExecStart"]
    found = []
    for instance in range(4):
        # Parse like systemd: %i is the instance, $$ a $.
        shown = line.replace("%i", str(instance)).replace("$$", "$").replace("exec ", "exec env ")
        shown = shown.replace('"echo"', '"printenv" "CUDA_VISIBLE_DEVICES" #')
        found.append(subprocess.run(["sh", "-c", shown], capture_output=True, text=True, check=True).stdout.strip())
    assert found == devices


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd on this machine")
@pytest.mark.parametrize("changed", [{}, {"gpus": 0.5}, {"gpus": 2.0}, {"storage_url": URL, "home": HOME}])
def test_the_unit_is_valid_for_systemd(tmp_path: Path, changed: dict[str, object]) -> None:
    unit = tmp_path / "hpsearch-worker@.service"
    unit.write_text(text(engine="systemd", folder="/", **changed))
    command = [
        "systemd-analyze",
        "verify",
        "--man=no",
        "--recursive-errors=no",
        f"{tmp_path}/hpsearch-worker@3.service",
    ]
    (tmp_path / "hpsearch-worker@3.service").symlink_to(unit)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    unit.write_text(unit.read_text().replace("RestartForceExitStatus", "RestartForcedExitStatus"))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "RestartForcedExitStatus" in done.stderr, "a misspelt one would be noticed"


def test_arguments_are_quoted_for_systemd() -> None:
    assert launch.quote_systemd_word('a "b" $c %d \\') == '"a \\"b\\" $$c %%d \\\\"'
    assert launch.quote_systemd_word("$c", command=False) == '"$c"'
