"""The learning-rate range test: the loss while the rate climbs from far too low to far too high."""

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

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.config import RunPlan, TrainConfig
from hpsearch.objectives.training.data.dataset import Batch
from hpsearch.objectives.training.evaluation.running import RunningMetrics
from hpsearch.objectives.training.loop.build import build
from hpsearch.objectives.training.loop.epoch import train_step
from hpsearch.objectives.training.loop.guards import NonFiniteError, Point, told_apart
from hpsearch.objectives.training.loop.run import Run
from hpsearch.objectives.training.reports.plots import rate_range
from hpsearch.objectives.training.reproducibility.seeds import reproducible, seeded_on, set_seed

if TYPE_CHECKING:
    from hpsearch.objectives.objective import Objective

_PROBE = 512  # training samples, at most, on which every step is judged
_DIVERGED = 3.0  # times the fall so far, above the lowest loss
_LEAST = 1e-3  # of the first loss: a fall below it is none
_NOISE = 6.0  # times what the loss moves at random from step to step: a fall below it cannot be told


@dataclass(frozen=True)
class RateRange:
    """The result of a range test.

    Attributes:
        rates: one for each step, in a geometric sequence.
        losses: after each step, on the same samples, because batches differ more than a step changes.
        suggestion: the rate at which the loss falls fastest, to start from as a peak rate.
        highest: the rate of the lowest loss.
    """

    rates: list[float]
    losses: list[float]
    suggestion: float
    highest: float

    def write(self, folder: Path) -> None:
        """Writes `lr-range.json` and `lr-range.png`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "lr-range.json").write_text(json.dumps(dataclasses.asdict(self)) + "\n")
        rate_range(self.rates, self.losses, folder / "lr-range.png", suggestion=self.suggestion)


def lr_range(
    objective: Objective,
    config: TrainConfig | None = None,
    *,
    seed: int = 0,
    lowest: float = 1e-6,
    highest: float = 10.0,
    steps: int = 200,
    device: torch.device | None = None,
) -> RateRange:
    """Train a new model with a rate that climbs exponentially until the loss diverges (Smith 2017).

    Args:
        objective: the model and data to train.
        config: its rate and schedule are not used. None is the objective's default.
        seed: of the split, the weights and the order.
        lowest: the first rate.
        highest: the last rate, unless the loss diverges before.
        steps: from the first to the last rate.
        device: None is the CPU.

    Raises:
        ObjectiveError: the settings make no range, the objective has a fault, or the loss falls by less than its random
            variation.
    """
    if not (0 < lowest < highest and steps >= 10):
        raise ObjectiveError(
            f"a range needs 0 < lowest < highest and at least 10 steps, not {lowest}, {highest}, {steps}"
        )
    config = config or objective.default_config()
    device = device or torch.device("cpu")
    flat = dataclasses.replace(
        config, lr=lowest, schedule="constant", warmup_fraction=0.0, warmup_steps=None, compile=False, log_every=None
    )
    with reproducible(deterministic=config.deterministic), told_apart(flat, device):
        run, _ = build(objective, flat, RunPlan(1, seed, seed), device=device)
        rates, losses = _climb(run, lowest, (highest / lowest) ** (1 / (steps - 1)), steps)
    return _judged(rates, losses)


def _climb(run: Run, lowest: float, factor: float, steps: int) -> tuple[list[float], list[float]]:
    set_seed(run.plan.seed, "range")
    run.model.train()
    train = run.splits.train
    probe = train.batch(torch.randperm(len(train))[:_PROBE]).to(run.device)
    starts = [group["lr"] / lowest for group in run.optimizer.param_groups]
    rates: list[float] = []
    losses: list[float] = []
    first = low = _loss(run, probe)
    windows = itertools.chain.from_iterable(run.feed.windows(epoch) for epoch in itertools.count())
    for step, window in zip(range(steps), windows, strict=False):
        rate = lowest * factor**step
        for group, share in zip(run.optimizer.param_groups, starts, strict=True):
            group["lr"] = share * rate
        try:
            train_step(run, window, Point(0, step, step, rate), RunningMetrics(run.metrics))
        except NonFiniteError:
            break
        loss = _loss(run, probe)
        if not math.isfinite(loss):
            break
        rates.append(rate)
        losses.append(loss)
        low = min(low, loss)
        if loss > low + _DIVERGED * max(first - low, 0.1 * abs(first), _LEAST):
            break
    return rates, losses


@torch.no_grad()
def _loss(run: Run, probe: Batch) -> float:
    """The loss of the probe as training sees it, with the same dropout each time."""
    with seeded_on(run.device, run.plan.seed, "probe"):
        return float(run.stepping(run.model, probe, run.precision.autocast()).loss)


def _judged(rates: list[float], losses: list[float]) -> RateRange:
    if len(losses) < 3 or losses[0] - min(losses) <= _LEAST * abs(losses[0]):
        raise ObjectiveError("the loss fell at no learning rate of the range: run the smoke test, or try a lower range")
    bottom, fall = losses.index(min(losses)), losses[0] - min(losses)
    # Second differences are free of the trend: of noise with deviation 1 their median size is 0.6745 times root 6.
    bends = [abs(losses[i - 1] - 2 * losses[i] + losses[i + 1]) for i in range(1, max(bottom, 2))]
    noise = statistics.median(bends) / (0.6745 * math.sqrt(6))
    if fall < _NOISE * noise:
        raise ObjectiveError(
            f"no learning rate can be told: from step to step the loss moves by {noise:.2g} at random, and it fell by "
            f"{fall:.2g} in all; try a larger batch_size, or more steps"
        )
    half = max(len(losses) // 40, 2)
    around = [losses[max(i - half, 0) : i + half + 1] for i in range(bottom + 1)]
    slopes = [statistics.linear_regression(range(len(values)), values).slope for values in around]
    steepest = min(range(len(slopes)), key=slopes.__getitem__)
    return RateRange(rates, losses, rates[steepest], rates[bottom])
