"""Learning-rate range test: the loss while the learning rate increases from too low to too high."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hpsearch.objectives.errors import ObjectiveError, wrap_training_errors
from hpsearch.objectives.training.config import RunPlan, TrainConfig
from hpsearch.objectives.training.data.dataset import Batch
from hpsearch.objectives.training.evaluation.running_metrics import RunningMetrics
from hpsearch.objectives.training.loop.build import build_run
from hpsearch.objectives.training.loop.epoch import train_step
from hpsearch.objectives.training.loop.guards import NonFiniteError, StepPosition, translate_torch_errors
from hpsearch.objectives.training.loop.run import Run
from hpsearch.objectives.training.reports.plots import plot_lr_range
from hpsearch.objectives.training.reproducibility.seeds import make_reproducible, seed_device_temporarily, set_seed

if TYPE_CHECKING:
    from hpsearch.objectives.objective import Objective

_PROBE_SAMPLES = 512  # maximum number of training samples to evaluate after each step
_DIVERGENCE_FACTOR = 3.0  # a loss higher than the minimum by this multiple of the fall so far has diverged
_MIN_FALL = 1e-3  # share of the first loss; a smaller fall is ignored
_MIN_SIGNAL_TO_NOISE = 6.0  # minimum ratio of the fall to the random variation of the loss between steps


@dataclass(frozen=True)
class LrRangeResult:
    """Result of a learning-rate range test.

    Attributes:
        rates: learning rate of each step, a geometric sequence.
        losses: loss after each step, always on the same samples, because losses differ more between batches than
            between two steps.
        suggestion: suggested peak learning rate: the rate at which the loss falls fastest.
        highest: the rate at which the loss is lowest; higher rates increase the loss.
    """

    rates: list[float]
    losses: list[float]
    suggestion: float
    highest: float

    def write(self, folder: Path) -> None:
        """Write `lr-range.json` and `lr-range.png`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "lr-range.json").write_text(json.dumps(dataclasses.asdict(self)) + "\n")
        plot_lr_range(self.rates, self.losses, folder / "lr-range.png", suggestion=self.suggestion)


def run_lr_range_test(
    objective: Objective,
    config: TrainConfig | None = None,
    *,
    seed: int = 0,
    lowest: float = 1e-6,
    highest: float = 10.0,
    steps: int = 200,
    device: torch.device | None = None,
) -> LrRangeResult:
    """Train a new model with an exponentially increasing learning rate until the loss diverges (Smith 2017).

    Args:
        objective: the objective to train.
        config: configuration, whose learning rate and schedule are ignored; None for the objective's default.
        seed: seed of the split, the initial weights and the sample order.
        lowest: the first learning rate.
        highest: the last learning rate, unless the loss diverges earlier.
        steps: number of steps from the first to the last rate.
        device: device to train on; None for the CPU.

    Raises:
        ObjectiveError: the range is invalid, the objective has a fault, or the loss falls by less than its random
            variation.
    """
    if not (0 < lowest < highest and steps >= 10):
        raise ObjectiveError(
            f"the learning-rate range test needs 0 < lowest < highest and steps >= 10, not lowest={lowest}, "
            f"highest={highest} and steps={steps}"
        )
    config = config or objective.default_config()
    device = device or torch.device("cpu")
    flat = dataclasses.replace(
        config, lr=lowest, schedule="constant", warmup_fraction=0.0, warmup_steps=None, compile=False, log_every=None
    )
    wrapped = wrap_training_errors(f"{type(objective).__name__} in the test")
    with make_reproducible(deterministic=config.deterministic), wrapped, translate_torch_errors(flat, device):
        run, _ = build_run(objective, flat, RunPlan(1, seed, seed), device=device)
        rates, losses = _increase_lr(run, lowest, (highest / lowest) ** (1 / (steps - 1)), steps)
    return _suggest_lr(rates, losses)


def _increase_lr(run: Run, lowest: float, factor: float, steps: int) -> tuple[list[float], list[float]]:
    set_seed(run.plan.seed, "range")
    run.model.train()
    train = run.splits.train
    probe = train.batch(torch.randperm(len(train))[:_PROBE_SAMPLES]).to(run.device)
    starts = [group["lr"] / lowest for group in run.optimizer.param_groups]
    rates: list[float] = []
    losses: list[float] = []
    first = low = _evaluate_probe(run, probe)
    step_batches = itertools.chain.from_iterable(run.batch_source.iterate_steps(epoch) for epoch in itertools.count())
    for step, micro_batches in zip(range(steps), step_batches, strict=False):
        rate = lowest * factor**step
        for group, share in zip(run.optimizer.param_groups, starts, strict=True):
            group["lr"] = share * rate
        try:
            train_step(run, micro_batches, StepPosition(0, step, step, rate), RunningMetrics(run.metrics))
        except NonFiniteError:
            break
        loss = _evaluate_probe(run, probe)
        if not math.isfinite(loss):
            break
        rates.append(rate)
        losses.append(loss)
        low = min(low, loss)
        if loss > low + _DIVERGENCE_FACTOR * max(first - low, 0.1 * abs(first), _MIN_FALL):
            break
    return rates, losses


@torch.no_grad()
def _evaluate_probe(run: Run, probe: Batch) -> float:
    """Return the training loss of the batch `probe`, with the same dropout mask at each call."""
    with seed_device_temporarily(run.device, run.plan.seed, "probe"):
        return float(run.step_function(run.model, probe, run.precision.autocast()).loss)


def _suggest_lr(rates: list[float], losses: list[float]) -> LrRangeResult:
    if len(losses) < 3 or losses[0] - min(losses) <= _MIN_FALL * abs(losses[0]):
        raise ObjectiveError("no learning rate reduces the loss; run `hpsearch smoke`, or try a lower range")
    bottom, fall = losses.index(min(losses)), losses[0] - min(losses)
    # Second differences remove the trend; for noise of deviation 1 their median magnitude is 0.6745 * sqrt(6).
    bends = [abs(losses[i - 1] - 2 * losses[i] + losses[i + 1]) for i in range(1, max(bottom, 2))]
    noise = statistics.median(bends) / (0.6745 * math.sqrt(6))
    if fall < _MIN_SIGNAL_TO_NOISE * noise:
        raise ObjectiveError(
            f"no learning rate can be suggested, because the loss falls by only {fall:.2g} and varies by {noise:.2g} "
            "between steps; try a larger batch_size, or more steps"
        )
    half = max(len(losses) // 40, 2)
    around = [losses[max(i - half, 0) : i + half + 1] for i in range(bottom + 1)]
    slopes = [statistics.linear_regression(range(len(values)), values).slope for values in around]
    steepest = min(range(len(slopes)), key=slopes.__getitem__)
    return LrRangeResult(rates, losses, rates[steepest], rates[bottom])
