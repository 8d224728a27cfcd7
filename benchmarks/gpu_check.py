"""Check the guarantees of training on this machine's GPUs, and compare speed and memory with a loop written by hand.

    python -m benchmarks.gpu_check --report gpu_check.md

The checks of ranks use all GPUs; with one GPU, they use one NCCL rank. `--device cpu` tries the checks without a GPU.
The exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.training_loops import Synthetic, bare, ours, ratio
from hpsearch import Step, TrainConfig, Trainer
from hpsearch.objectives.training.ranks import RankLostError, Ranks, init_group_of_one, init_process_group
from hpsearch.objectives.training.session import LocalSession, MidEpochAction, Verdict

EPOCHS, ROWS = 3, 2_000
RANKED_NET = {
    "cuda": "transformer",
    "cpu": "mlp",
}  # without dropout, whose random numbers depend on the rank; a transformer takes minutes on a CPU
TIMEOUT_SECONDS = 30.0  # of the collectives; a hang must end within this time plus 10 s
_TIMES = ("epoch_seconds", "samples_per_second", "samples_per_second_per_device", "scaling_efficiency", "peak_memory")
_EXACT = [  # deterministic settings, which must resume with the same bits
    ("cnn", {}),
    ("cnn", {"precision": "bf16", "channels_last": True}),
    ("cnn", {"precision": "fp16"}),
    ("transformer", {"precision": "bf16"}),
    ("transformer", {"precision": "bf16", "compile": True}),
]
_RANKED: dict[str, dict[str, Any]] = {  # settings of runs on ranks
    "DDP": {},
    "DDP, bf16": {"precision": "bf16"},
    "FSDP": {"strategy": "fsdp"},
    "FSDP, sharded checkpoints": {"strategy": "fsdp", "shard_checkpoint_above_gib": 0.0},
    "FSDP, bf16, activation checkpointing": {
        "strategy": "fsdp",
        "precision": "bf16",
        "activation_checkpointing": True,
    },
}


@dataclass(frozen=True)
class Row:
    """A result: `passed` is None for a figure without a required value."""

    name: str
    passed: bool | None
    detail: str

    def __str__(self) -> str:
        return f"{ {True: 'pass', False: 'FAIL', None: 'figure'}[self.passed]:6}  {self.name}: {self.detail}"


@dataclass(frozen=True)
class Machine:
    """The devices of the checks."""

    device: str
    ranks: int
    rows: int

    def describe(self) -> str:
        """Return hardware and versions as one line."""
        cuda = self.device == "cuda"
        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if cuda else ["CPU"]
        versions = [f"hpsearch {importlib.metadata.version('hpsearch')}", f"torch {torch.__version__}"]
        if cuda:
            versions.append("NCCL " + ".".join(map(str, torch.cuda.nccl.version())))
        versions.append(f"Python {platform.python_version()}")
        return f"{len(gpus)} x {gpus[0]}; {', '.join(versions)}; checks of ranks with {self.ranks}"


class _Stopping(LocalSession):
    """Session that stops a run after a step of an epoch, or after an epoch."""

    def __init__(self, folder: Path, *, after_epoch: int | None = None, after_step: int | None = None) -> None:
        super().__init__(folder)
        self._after_epoch, self._left = after_epoch, after_step

    def report(self, record: Any) -> Verdict:
        return Verdict.STOP if record.epoch == self._after_epoch else Verdict.CONTINUE

    def mid_epoch_action(self, left: Callable[[], float]) -> MidEpochAction:
        if self._left is None:
            return MidEpochAction.NONE
        self._left -= 1
        return MidEpochAction.NONE if self._left else MidEpochAction.SAVE_AND_STOP


@dataclass(frozen=True)
class Outcome:
    """Metrics of all epochs, without times, and the best weights, on the CPU."""

    metrics: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    samples_per_second: float
    peak_bytes: float

    def distance(self, other: Outcome) -> tuple[float, float]:
        """Return the largest differences of metrics and of weights."""
        pairs = zip(self.metrics, other.metrics, strict=True)
        metrics = max(abs(mine[name] - theirs[name]) for mine, theirs in pairs for name in mine)
        weights = max(float((self.weights[name] - w).abs().max()) for name, w in other.weights.items() if w.numel())
        return metrics, weights


def _fit(net: str, settings: dict[str, Any], device: str, rows: int, session: LocalSession | None = None) -> Outcome:
    config = TrainConfig(batch_size=64, **settings)
    print(f"        training {net} on {device} {settings}", file=sys.stderr, flush=True)
    result = Trainer(Synthetic(net, rows), config, epochs=EPOCHS, seed=0, device=device, session=session).fit()
    history = [record.metrics for record in result.history]
    kept = [{name: value for name, value in one.items() if not name.startswith(_TIMES)} for one in history]
    weights = {name: w.cpu() for name, w in result.model.state_dict().items() if not w.is_meta}  # with FSDP on rank 0
    speed = max((one["samples_per_second"] for one in history[1:]), default=0.0)  # the first epoch compiles
    return Outcome(kept, weights, speed, max((one.get("peak_memory_bytes", 0.0) for one in history), default=0.0))


def _fit_with_stops(
    net: str, settings: dict[str, Any], device: str, rows: int, folder: Path, ranks: Ranks | None = None
) -> Outcome:
    """Train with a stop after an epoch and a stop within an epoch, each with a resume."""

    def session(**stop: int) -> LocalSession | None:
        return _Stopping(folder, **stop) if ranks is None or ranks.is_rank_zero else None

    _fit(net, settings, device, rows, session(after_epoch=0))
    if ranks is None:  # several ranks agree on a stop every 0.25 s, so the step is not exact
        _fit(net, settings, device, rows, session(after_step=3))
    return _fit(net, settings, device, rows, session())


def check_resume(machine: Machine) -> Iterator[Row]:
    """Check that deterministic runs resume with the same bits."""
    for net, settings in _EXACT:
        with tempfile.TemporaryDirectory() as folder:
            whole = _fit(net, settings, machine.device, machine.rows)
            resumed = _fit_with_stops(net, settings, machine.device, machine.rows, Path(folder))
        distance = whole.distance(resumed)
        detail = "bit-equal after two stops" if distance == (0, 0) else f"metrics and weights differ by {distance}"
        yield Row(f"resume, {net} {settings or 'fp32'}", distance == (0, 0), detail)


def check_ranks(machine: Machine) -> Iterator[Row]:
    """Check that training on ranks equals one process, resumes, and survives an error on one rank."""
    with tempfile.TemporaryDirectory() as name:
        folder, alone = Path(name), {}
        for precision in ("fp32", "bf16"):
            settings = {"matmul_precision": "highest", "precision": precision}
            alone[precision] = _fit(RANKED_NET[machine.device], settings, machine.device, machine.rows)
        code = _run_ranks(machine, folder, _rank_checks)
        for title, settings in _RANKED.items():
            if not (folder / title).exists():
                yield Row(f"ranks, {title}", False, f"no result; the ranks ended with {code}")
                continue
            whole, resumed = torch.load(folder / title, weights_only=False)  # written by this program
            precision = settings.get("precision", "fp32")
            metrics, weights = whole.distance(alone[precision])
            limit = {"fp32": 1e-4, "bf16": 0.05}[precision]  # bf16 has 8 bits
            detail = f"metrics within {metrics:.1e}, weights within {weights:.1e} of one process"
            yield Row(f"ranks, {title}", max(metrics, weights) <= limit, detail)
            distance = whole.distance(resumed)
            yield Row(f"ranks, {title}, resume", distance == (0, 0), f"metrics and weights differ by {distance}")
        text = (folder / "error").read_text() if (folder / "error").exists() else f"the ranks ended with {code}"
        yield Row("ranks, error on one rank", text.endswith("all ranks continue"), text)


def _rank_checks(ranks: Ranks, device: str, rows: int, folder: Path) -> None:
    for title, settings in _RANKED.items():
        config = {"matmul_precision": "highest", **settings}  # ranks add in another order, which changes TF32 more
        net = RANKED_NET[torch.device(device).type]
        whole = _fit(net, config, device, rows)
        resumed = _fit_with_stops(net, config, device, rows, folder / f"{title}.run", ranks)
        if ranks.is_rank_zero:
            torch.save((whole, resumed), folder / title)
    started = time.monotonic()
    try:
        with ranks.fail_together():
            if ranks.rank == ranks.world_size - 1:
                raise ValueError("planned error")
            ranks.all_reduce_sum(torch.ones(1, device=device))
            torch.zeros(1, device=device).item()  # waits for the collective on this device
    except RankLostError:
        raise
    except Exception as error:  # a RankError, or the error itself
        seconds = time.monotonic() - started
        total = ranks.all_reduce_sum(torch.ones(1, device=device)).item()
        if ranks.is_rank_zero and total == ranks.world_size:
            text = f"{type(error).__name__} after {seconds:.1f} s; all ranks continue"
            (folder / "error").write_text(text)


def check_hang(machine: Machine) -> Iterator[Row]:
    """Check that the other ranks end in time if one rank is suspended in a step."""
    if machine.ranks < 2:
        return
    with tempfile.TemporaryDirectory() as name:
        _run_ranks(machine, Path(name), _hang, limit=TIMEOUT_SECONDS * 3)
        times = [float(path.read_text()) for path in Path(name).glob("suspended")]
        seconds = time.time() - times[0] if times else float("nan")
    yield Row("ranks, hang in a step", seconds <= TIMEOUT_SECONDS + 10, f"the ranks ended after {seconds:.1f} s")


class _Suspended(Synthetic):
    """The last rank suspends itself in its third step."""

    folder: Path
    steps = 0

    def step(self, model: nn.Module, batch: Any, config: TrainConfig) -> Step:
        self.steps += model.training
        if self.steps == 3 and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
            (self.folder / "suspended").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return Step(nn.functional.cross_entropy(model(batch.x), batch.y, reduction="none"))


def _hang(_ranks: Ranks, device: str, rows: int, folder: Path) -> None:
    objective = _Suspended("cnn", rows)
    objective.folder = folder
    Trainer(objective, TrainConfig(), epochs=EPOCHS, seed=0, device=device).fit()


def check_scaling(machine: Machine) -> Iterator[Row]:
    """Measure samples per second of all ranks, relative to the same number of single processes."""
    for strategy, compiled in (("ddp", False), ("ddp", True), ("fsdp", False)):
        speeds, memory = {}, 0.0
        for count in sorted({1, machine.ranks}):
            with tempfile.TemporaryDirectory() as name:
                code = _run_ranks(replace(machine, ranks=count), Path(name), _measure_speed, strategy, compiled)
                if not (Path(name) / "speed").exists():
                    yield Row(f"speed, {strategy} on {count}", False, f"the ranks ended with {code}")
                    return
                speeds[count], memory = torch.load(Path(name) / "speed", weights_only=True)
        each = speeds[machine.ranks] / machine.ranks
        detail = f"{speeds[machine.ranks]:,.0f} samples/s, {each / speeds[1]:.0%} of linear, peak {memory / 1e9:.2f} GB"
        yield Row(f"speed, {strategy}, bf16{', compiled' * compiled}, on {machine.ranks}", None, detail)


def _measure_speed(ranks: Ranks, device: str, rows: int, folder: Path, strategy: str, compiled: bool) -> None:
    config = {"precision": "bf16", "strategy": strategy, "deterministic": False, "compile": compiled}
    found = _fit(RANKED_NET[torch.device(device).type], config, device, rows)
    if ranks.is_rank_zero:
        torch.save((found.samples_per_second, found.peak_bytes), folder / "speed")


def _run_ranks(machine: Machine, folder: Path, work: Callable[..., None], *arguments: Any, limit: float = 900.0) -> str:
    """Run `work` in one process per rank; kill the others once one has failed. Return the exit codes as text."""
    context = torch.multiprocessing.get_context("spawn")
    store = folder / "store"
    processes = [
        context.Process(target=_rank, args=(rank, machine, store, work, arguments)) for rank in range(machine.ranks)
    ]
    for process in processes:
        process.start()
    until = time.monotonic() + limit
    while any(process.is_alive() for process in processes) and time.monotonic() < until:
        if any(process.exitcode for process in processes):
            break
        time.sleep(0.2)
    for process in processes:
        process.kill()
        process.join()
    return ", ".join(str(process.exitcode) for process in processes)


def _rank(rank: int, machine: Machine, store: Path, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(machine.ranks), "LOCAL_RANK": str(rank)}
    device = f"cuda:{rank}" if machine.device == "cuda" else machine.device
    if machine.device == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    with init_process_group(device=device, timeout=TIMEOUT_SECONDS, store_path=store) as ranks:
        if machine.ranks == 1:  # one GPU: use NCCL, DDP and FSDP all the same
            type(ranks).is_single_process = property(lambda _self: False)  # type: ignore[method-assign,assignment]
        work(ranks, device, machine.rows, store.parent, *arguments)


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
    epoch = make(net, "cuda", settings)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    epoch()
    del epoch
    return torch.cuda.max_memory_allocated() - before // 2


def check_search(machine: Machine) -> Iterator[Row]:
    """Check a search on the device, one of whose workers is killed."""
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "HPSEARCH_HOME": home}
        command = [sys.executable, "-m", "hpsearch"]
        settings = ["--trials", "8", "--epochs", "5", "--name", "gpu-check", "--seed", "0"]
        settings += ["--workers-per-gpu", "2"] if machine.device == "cuda" else ["--workers", "2"]
        started = time.monotonic()
        run = subprocess.Popen([*command, "run", "digits", *settings], env=environment, stdout=subprocess.DEVNULL)
        killed = _kill_a_worker(run, [*command, "top", "gpu-check", "--json"], environment)
        code = run.wait()
        seconds = time.monotonic() - started
        exported = Path(home) / "trials.json"
        subprocess.run([*command, "export", "gpu-check", "-o", str(exported)], env=environment, check=True)
        trials = json.loads(exported.read_text())
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
