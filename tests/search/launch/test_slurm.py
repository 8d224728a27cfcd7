"""The script for Slurm in a real bash, with fake engine commands: requeue codes, signals and quoting.

What a real Slurm makes of it is in test_slurm_engine.py.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.search.launch.support import HOME, URL, text

# A worker that exits with the code of its place, or waits for SIGTERM and then exits after a while.
_WORKER = """#!/bin/bash
echo "$@" >> "$TMP_/arguments"
number=1
until mkdir "$TMP_/place-$number" 2>/dev/null; do number=$((number + 1)); done
env -0 > "$TMP_/environment"
trap 'echo signalled >> "$TMP_/signals"; signals=$((signals + 1))' TERM
echo $$ >> "$TMP_/started"
code=$(cut -d" " -f$number <<< "$CODES")
if [[ $code == wait ]]; then
  until ((signals >= ${TIMES:-1})); do sleep 0.05; done
  sleep 0.3
  exit 143
fi
[[ $code == 9 ]] && kill -9 $$
exit "$code"
"""
_SQUEUE = '#!/bin/bash\necho "$@" >> "$TMP_/squeue"\necho "$STATE"\n'
_SCONTROL = '#!/bin/bash\necho "$@" >> "$TMP_/scontrol"\n'


class Node:
    """A folder with fake commands and the script."""

    def __init__(self, folder: Path, **changed: object) -> None:
        self.folder, self.noted = folder, folder / "noted"
        self.noted.mkdir()
        for name, source in (("fake-worker", _WORKER), ("squeue", _SQUEUE), ("scontrol", _SCONTROL)):
            path = folder / name
            path.write_text(source)
            path.chmod(0o755)
        self.script = folder / "script.sh"
        self.script.write_text(text(command=(str(folder / "fake-worker"),), **changed))

    def start(self, codes: str, state: str = "RUNNING", task: int = 2) -> subprocess.Popen[str]:
        environment = {
            **os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}", "TMP_": str(self.noted), "CODES": codes,
            "STATE": state, "SLURM_JOB_ID": "70", "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": str(task),
        }  # fmt: skip
        return subprocess.Popen(
            ["bash", self.script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self, codes: str, state: str = "RUNNING", task: int = 2) -> int:
        process = self.start(codes, state, task)
        process.communicate(timeout=60)
        return process.returncode

    def said(self, name: str) -> list[str]:
        path = self.noted / name
        return path.read_text().splitlines() if path.exists() else []

    def wait(self, name: str, lines: int) -> None:
        end = time.monotonic() + 60
        while len(self.said(name)) < lines:
            assert time.monotonic() < end
            time.sleep(0.02)  # until a condition holds


def options(script: str) -> dict[str, str]:
    """Return the #SBATCH options."""
    return dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", script, re.MULTILINE))


def test_the_slurm_options_of_the_script() -> None:
    script = text(workers=8, cpus=3, memory="6G", time="1-04:00:00", grace=90)
    assert options(script) == {
        "job-name": "hpsearch-wine", "array": "1-8", "nodes": "1", "ntasks": "1", "cpus-per-task": "3", "mem": "6G",
        "time": "1-04:00:00", "requeue": "", "open-mode": "append", "output": "hpsearch-wine-%A_%a.log",
        "signal": "B:TERM@90",
    }  # fmt: skip
    assert " worker --study wine --grace 85 &\n" in script
    assert "time" not in options(text())
    assert script.index("#SBATCH --signal") < script.index("\nexport"), "sbatch reads no option below a command"


@pytest.mark.parametrize(
    ("gpus", "workers", "found"),
    [
        (1.0, 5, {"array": "1-5", "gres": "gpu:1", "cpus-per-task": "2", "mem": "8G"}),
        (2.0, 5, {"array": "1-5", "gres": "gpu:2", "cpus-per-task": "2", "mem": "8G"}),
        (0.5, 5, {"array": "1-3", "gres": "gpu:1", "cpus-per-task": "4", "mem": "16G"}),
        (0.25, 2, {"array": "1-1", "gres": "gpu:1", "cpus-per-task": "4", "mem": "16G"}),
        (0.9, 2, {"array": "1-2", "gres": "gpu:1", "cpus-per-task": "2", "mem": "8G"}),
    ],
)
def test_gpus_and_workers_that_share_them(gpus: float, workers: int, found: dict[str, str]) -> None:
    script = text(gpus=gpus, workers=workers)
    assert {name: options(script)[name] for name in found} == found
    assert (" --devices 2 &" in script) == (gpus == 2), "a trial trains on all that its worker has"
    assert "CUDA_VISIBLE_DEVICES" not in script, "Slurm sets it"


@pytest.mark.parametrize("changed", [{}, {"gpus": 0.5}, {"storage_url": URL, "home": HOME}, {"storage_url": None}])
def test_the_script_is_valid_bash(changed: dict[str, object]) -> None:
    subprocess.run(["bash", "-n"], input=text(**changed), text=True, check=True)


@pytest.mark.parametrize("code", [0, 1, 2, 3, 134, 137, 139, 143])
@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING", "PENDING", "PREEMPTED", ""])
def test_exit_codes_that_requeue_a_job(tmp_path: Path, code: int, state: str) -> None:
    node = Node(tmp_path)
    assert node.run("9" if code == 137 else str(code), state) == code
    again = code == 1 or code > 128
    assert node.said("squeue") == (["-h -j 70_2 -o %T"] if again else [])
    assert node.said("scontrol") == (["requeue 70_2"] if again and state == "RUNNING" else [])


@pytest.mark.parametrize(
    ("codes", "code"),
    [("0 0", 0), ("0 143", 143), ("143 3", 3), ("2 0", 2), ("1 0", 1), ("1 143", 143), ("0 9", 137), ("9 1", 1)],
)
def test_a_final_exit_code_of_one_worker_has_precedence(tmp_path: Path, codes: str, code: int) -> None:
    node = Node(tmp_path, gpus=0.5, workers=3)
    assert node.run(codes, task=1) == code
    assert len(node.said("started")) == 2


def test_the_last_task_runs_the_remaining_workers(tmp_path: Path) -> None:
    node = Node(tmp_path, gpus=0.5, workers=3)
    assert node.run("0 0", task=2) == 0
    assert len(node.said("started")) == 1


@pytest.mark.parametrize("times", [1, 3])
def test_a_signal_is_forwarded_and_the_script_waits_for_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    node = Node(tmp_path)
    monkeypatch.setenv("TIMES", str(times))
    process = node.start("wait")
    node.wait("started", 1)
    for number in range(times):
        process.send_signal(signal.SIGTERM)
        node.wait("signals", number + 1)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert output == "hpsearch: requeued after exit code 143\n"
    assert node.said("scontrol") == ["requeue 70_2"]


def test_a_signal_reaches_all_workers_that_share_a_gpu(tmp_path: Path) -> None:
    node = Node(tmp_path, gpus=0.5, workers=4)
    process = node.start("wait wait wait")
    node.wait("started", 2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert node.said("signals") == ["signalled", "signalled"]


def test_a_worker_that_exits_with_0_after_a_signal_is_not_requeued(tmp_path: Path) -> None:
    node = Node(tmp_path)
    worker = tmp_path / "fake-worker"
    worker.write_text(_WORKER.replace("exit 143", "exit 0"))
    process = node.start("wait")
    node.wait("started", 1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert node.said("scontrol") == []


def test_values_are_passed_unchanged(tmp_path: Path) -> None:
    node = Node(tmp_path, storage_url=URL, home=HOME)
    assert node.run("0") == 0
    found = dict(line.split("=", 1) for line in (node.noted / "environment").read_text().split("\0") if "=" in line)
    assert (found["HPSEARCH_STORAGE_URL"], found["HPSEARCH_HOME"]) == (URL, HOME)
    assert (found["OMP_NUM_THREADS"], found["CUDA_VISIBLE_DEVICES"]) == ("2", "")
    assert node.said("arguments") == ["worker --study wine --grace 55"]
