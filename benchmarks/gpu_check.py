"""Check the guarantees of training on this machine's GPUs, and compare speed and memory with a loop written by hand.

    python -m benchmarks.gpu_check --report gpu_check.md

The checks of ranks use all GPUs; with one GPU, they use one NCCL rank. `--device cpu` tries the checks without a GPU.
The exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_ranks import check_hang, check_ranks, check_scaling
from benchmarks.gpu_runs import Machine, Row, fit, fit_with_stops
from benchmarks.training_loops import bare, ours, ratio
from hpsearch.objectives.training.ranks import init_group_of_one

ROWS = 2_000
_EXACT = [  # deterministic settings, which must resume with the same bits
    ("cnn", {}),
    ("cnn", {"precision": "bf16", "channels_last": True}),
    ("cnn", {"precision": "fp16"}),
    ("transformer", {"precision": "bf16"}),
    ("transformer", {"precision": "bf16", "compile": True}),
]


def check_resume(machine: Machine) -> Iterator[Row]:
    """Check that deterministic runs resume with the same bits."""
    for net, settings in _EXACT:
        with tempfile.TemporaryDirectory() as folder:
            whole = fit(net, settings, machine.device, machine.rows)
            resumed = fit_with_stops(net, settings, machine.device, machine.rows, Path(folder))
        distance = whole.distance(resumed)
        detail = "bit-equal after two stops" if distance == (0, 0) else f"metrics and weights differ by {distance}"
        yield Row(f"resume, {net} {settings or 'fp32'}", distance == (0, 0), detail)


def check_script_group(machine: Machine) -> Iterator[Row]:
    """Check the process group of scripts on one device: collectives on both devices, asynchronous checkpoints."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_saver import async_save

    with tempfile.TemporaryDirectory() as folder, init_group_of_one(torch.device(machine.device)):
        for device in ("cpu", machine.device):
            dist.all_reduce(torch.ones(1, device=device))
        async_save({"w": torch.ones(3, device=machine.device)}, checkpoint_id=folder).result()
        written = [path.name for path in Path(folder).iterdir()]
    yield Row("process group of a script", ".metadata" in written, "CPU and GPU tensors, async_save")


def check_speed(machine: Machine) -> Iterator[Row]:
    """Compare speed and peak memory with a loop written by hand."""
    if machine.device != "cuda":
        return
    for net, settings in (
        ("mlp", {}),
        ("cnn", {"precision": "bf16", "compile": True}),
        ("transformer", {"precision": "bf16"}),
        ("transformer", {"precision": "bf16", "compile": True}),
    ):
        found = ratio(net, bare, machine.device, **settings)
        peaks = [_peak(make, net, settings) for make in (ours, bare)]
        name = f"speed against a bare loop, {net} {settings or 'fp32'}"
        yield Row(name, found >= 0.95, f"{found:.2f} times; peak memory {peaks[0] / peaks[1]:.2f} times")


def _peak(make: Callable[..., Callable[[], float]], net: str, settings: dict[str, Any]) -> int:
    """Return the peak bytes of an epoch, including the weights and the optimizer's state."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    make(net, "cuda", settings)()
    return torch.cuda.max_memory_allocated() - before


def check_search(machine: Machine) -> Iterator[Row]:
    """Check a search on the device, one of whose workers is killed."""
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "HPSEARCH_HOME": home}
        command = [sys.executable, "-m", "hpsearch"]
        settings = ["--trials", "8", "--epochs", "5", "--name", "gpu-check", "--seed", "0"]
        settings += ["--workers-per-gpu", "2"] if machine.device == "cuda" else ["--workers", "2"]
        exported, started = Path(home) / "trials.json", time.monotonic()
        try:
            run = subprocess.Popen([*command, "run", "digits", *settings], env=environment, stdout=subprocess.DEVNULL)
            killed = _kill_a_worker(run, [*command, "top", "gpu-check", "--json"], environment)
            code, seconds = run.wait(), time.monotonic() - started
            subprocess.run([*command, "export", "gpu-check", "-o", str(exported)], env=environment, check=True)
            trials = json.loads(exported.read_text())
        finally:
            subprocess.run([*command, "down"], env=environment, stdout=subprocess.DEVNULL, check=False)
    states = [trial["state"] for trial in trials]
    ended = sum(state in {"COMPLETE", "PRUNED"} for state in states)
    detail = (
        f"{ended} of {len(states)} trials, exit code {code}, {killed} worker killed, {seconds:.0f} s with the services"
    )
    yield Row("search", code == 0 and ended == len(states) == 8, detail)


def _kill_a_worker(run: subprocess.Popen[bytes], top: list[str], environment: dict[str, str]) -> int:
    """Kill a worker of a search once it trains; return the number of killed processes."""
    while run.poll() is None:
        shown = subprocess.run(top, env=environment, capture_output=True, text=True, check=False)
        training = (
            [worker for worker in json.loads(shown.stdout)["workers"] if worker["trial"] is not None]
            if shown.returncode == 0
            else []
        )
        if training:
            os.kill(int(training[0]["identity"]["pid"]), signal.SIGKILL)
            return 1
    return 0


CHECKS: dict[str, Callable[[Machine], Iterator[Row]]] = {
    "resume": check_resume,
    "script": check_script_group,
    "ranks": check_ranks,
    "hang": check_hang,
    "scaling": check_scaling,
    "speed": check_speed,
    "search": check_search,
}


def run_checks(machine: Machine, names: list[str]) -> Iterator[Row]:
    """Run checks; an exception is a failed check."""
    for name in names:
        try:
            yield from CHECKS[name](machine)
        except Exception as error:  # other checks still give results
            traceback.print_exc()
            yield Row(name, False, f"{type(error).__name__}: {error}")


def main() -> int:
    """Run the checks and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--ranks", type=int, help="number of ranks  [default: number of GPUs; on a CPU 2]")
    parser.add_argument("--rows", type=int, default=ROWS, help="training samples of the synthetic data")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS), help="names of checks")
    parser.add_argument("--report", type=Path, help="Markdown file for the results")
    options = parser.parse_args()
    default = torch.cuda.device_count() if options.device == "cuda" else 2
    machine = Machine(options.device, options.ranks or default, options.rows)
    started, rows = time.monotonic(), []
    print(machine.describe(), flush=True)
    for row in run_checks(machine, options.only):
        rows.append(row)
        print(f"{time.monotonic() - started:5.0f} s  {row}", flush=True)
    if options.report:
        lines = [
            f"| {row.name} | {({True: 'pass', False: 'FAIL', None: ''})[row.passed]} | {row.detail} |" for row in rows
        ]
        table = "\n".join(["| check | result | detail |", "|---|---|---|", *lines])
        options.report.write_text(f"{machine.describe()}\n\n{table}\n")
    return int(any(row.passed is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
