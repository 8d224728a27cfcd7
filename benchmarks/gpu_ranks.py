"""GPU checks of training on several ranks: DDP, FSDP, errors, hangs and scaling."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_runs import EPOCHS, Machine, Row, fit, fit_with_stops
from benchmarks.training_loops import Synthetic
from hpsearch import Step, TrainConfig, Trainer
from hpsearch.objectives.training.rank_errors import RankLostError
from hpsearch.objectives.training.ranks import Ranks, init_process_group

# Networks without dropout, whose random numbers depend on the rank; a transformer takes minutes on a CPU.
RANKED_NET = {"cuda": "transformer", "cpu": "mlp"}
TIMEOUT_SECONDS = 30.0  # of the collectives; a hang must end within this time plus 10 s
# Ranks add in another order than one process. TF32 and AdamW, whose steps have the same size for small gradients, would
# make large differences of that.
_COMMON: dict[str, Any] = {"matmul_precision": "highest", "optimizer": "sgd", "lr": 0.02}
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
    "FSDP, accumulation": {"strategy": "fsdp", "gradient_accumulation_steps": 2},
}


def check_ranks(machine: Machine) -> Iterator[Row]:
    """Check that training on ranks equals one process, resumes, and survives an error on one rank."""
    with tempfile.TemporaryDirectory() as name:
        folder, alone = Path(name), {}
        for settings in _RANKED.values():
            own = _select_settings_of_one_process(settings)
            if str(own) not in alone:
                alone[str(own)] = fit(RANKED_NET[machine.device], {**_COMMON, **own}, machine.device, machine.rows)
        code = _run_ranks(machine, folder, _rank_checks)
        for title, settings in _RANKED.items():
            if not (folder / title).exists():
                yield Row(f"ranks, {title}", False, f"no result; the ranks ended with {code}")
                continue
            whole, resumed = torch.load(folder / title, weights_only=False)  # written by this program
            precision = settings.get("precision", "fp32")
            metrics, weights = whole.distance(alone[str(_select_settings_of_one_process(settings))])
            limit = {"fp32": 1e-4, "bf16": 0.05}[precision]  # bf16 has 8 bits
            detail = f"metrics within {metrics:.1e}, weights within {weights:.1e} of one process"
            yield Row(f"ranks, {title}", max(metrics, weights) <= limit, detail)
            distance = whole.distance(resumed)
            yield Row(f"ranks, {title}, resume", distance == (0, 0), f"metrics and weights differ by {distance}")
        text = (folder / "error").read_text() if (folder / "error").exists() else f"the ranks ended with {code}"
        yield Row("ranks, error on one rank", text.endswith("all ranks continue"), text)


def _select_settings_of_one_process(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that change the results of one process."""
    return {name: settings[name] for name in ("precision", "gradient_accumulation_steps") if name in settings}


def _rank_checks(ranks: Ranks, device: str, rows: int, folder: Path) -> None:
    for title, settings in _RANKED.items():
        config = {**_COMMON, **settings}
        net = RANKED_NET[torch.device(device).type]
        whole = fit(net, config, device, rows)
        resumed = fit_with_stops(net, config, device, rows, folder / f"{title}.run", ranks)
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
    for strategy, compiled in (("ddp", False), ("ddp", True), ("fsdp", False), ("fsdp", True)):
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
    found = fit(RANKED_NET[torch.device(device).type], config, device, rows)
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
