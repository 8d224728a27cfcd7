"""Training runs of the GPU checks, and the comparison of their outcomes."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.training_loops import Synthetic
from hpsearch import TrainConfig, Trainer
from hpsearch.objectives.training.ranks import Ranks
from hpsearch.objectives.training.session import LocalSession, MidEpochAction, Verdict

EPOCHS = 3
_TIMES = ("epoch_seconds", "samples_per_second", "samples_per_second_per_device", "scaling_efficiency", "peak_memory")


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


def fit(net: str, settings: dict[str, Any], device: str, rows: int, session: LocalSession | None = None) -> Outcome:
    config = TrainConfig(batch_size=64, **settings)
    print(f"        training {net} on {device} {settings}", file=sys.stderr, flush=True)
    result = Trainer(Synthetic(net, rows), config, epochs=EPOCHS, seed=0, device=device, session=session).fit()
    history = [record.metrics for record in result.history]
    kept = [{name: value for name, value in one.items() if not name.startswith(_TIMES)} for one in history]
    weights = {name: w.cpu() for name, w in result.model.state_dict().items() if not w.is_meta}  # with FSDP on rank 0
    speed = max((one["samples_per_second"] for one in history[1:]), default=0.0)  # the first epoch compiles
    return Outcome(kept, weights, speed, max((one.get("peak_memory_bytes", 0.0) for one in history), default=0.0))


def fit_with_stops(
    net: str, settings: dict[str, Any], device: str, rows: int, folder: Path, ranks: Ranks | None = None
) -> Outcome:
    """Train with a stop after an epoch and a stop within an epoch, each with a resume."""

    def session(**stop: int) -> LocalSession | None:
        return _Stopping(folder, **stop) if ranks is None or ranks.is_rank_zero else None

    fit(net, settings, device, rows, session(after_epoch=0))
    if ranks is None:  # several ranks agree on a stop every 0.25 s, so the step is not exact
        fit(net, settings, device, rows, session(after_step=3))
    return fit(net, settings, device, rows, session())
