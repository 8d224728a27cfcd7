"""The learning-rate range test: the loss while the rate climbs from far too low to far too high."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from objectives.errors import ObjectiveError
from objectives.training.config import TrainConfig
from objectives.training.data.batches import Window
from objectives.training.loop.build import build
from objectives.training.loop.epoch import RunningMetrics, train_step
from objectives.training.loop.guards import NonFiniteError, Point, told_apart
from objectives.training.loop.run import Run
from objectives.training.reports.plots import rate_range
from objectives.training.reproducibility.seeds import reproducible, set_seed

if TYPE_CHECKING:
    from objectives.objective import Objective

_SMOOTHING = 0.9  # of the moving average of the losses, with its bias corrected
_DIVERGED = 4.0  # times the lowest smoothed loss


@dataclass(frozen=True)
class RateRange:
    """What the test came to.

    Attributes:
        rates: one a step, each a constant factor above the one before.
        losses: the smoothed loss of the step.
        suggestion: the rate where the loss falls fastest: a peak rate to start from.
        highest: the rate of the lowest loss: above it training gets worse.
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
    """Trains with a rate that climbs exponentially until the loss diverges (Smith 2017), on a model of its own.

    Args:
        objective: what to train.
        config: how, but for the rate and its schedule; the objective's default unless given.
        seed: of the split, the weights and the order.
        lowest: the first rate.
        highest: the last one, if the loss does not diverge before.
        steps: from one to the other.
        device: where; the CPU unless given.

    Raises:
        ObjectiveError: the settings make no range, the objective is wrong, or the loss never falls.
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
        run, _ = build(objective, flat, epochs=1, seed=seed, split_seed=seed, device=device)
        rates, losses = _climb(run, lowest, (highest / lowest) ** (1 / (steps - 1)), steps)
    return _judged(rates, losses)


def _climb(run: Run, lowest: float, factor: float, steps: int) -> tuple[list[float], list[float]]:
    set_seed(run.seed, "range")
    run.model.train()
    starts = [group["lr"] / lowest for group in run.optimizer.param_groups]
    rates: list[float] = []
    losses: list[float] = []
    average = 0.0
    for step, window in zip(range(steps), _endless(run), strict=False):
        rate = lowest * factor**step
        for group, share in zip(run.optimizer.param_groups, starts, strict=True):
            group["lr"] = share * rate
        try:
            mean, _ = train_step(run, window, Point(0, step, step, rate), RunningMetrics(run.metrics))
        except NonFiniteError:
            break
        loss = float(mean)
        average = _SMOOTHING * average + (1 - _SMOOTHING) * loss
        rates.append(rate)
        losses.append(average / (1 - _SMOOTHING ** (step + 1)))
        if losses[-1] > _DIVERGED * min(losses) or not math.isfinite(loss):
            break
    return rates, losses


def _endless(run: Run) -> Iterator[Window]:
    return itertools.chain.from_iterable(run.feed.windows(epoch) for epoch in itertools.count())


def _judged(rates: list[float], losses: list[float]) -> RateRange:
    if len(losses) < 3 or min(losses) >= losses[0]:
        raise ObjectiveError("the loss fell at no learning rate of the range: run the smoke test, or try a lower range")
    bottom = losses.index(min(losses))
    # The steepest fall in log-rate before the bottom, over the noise of a step.
    slopes = [losses[i + 1] - losses[i - 1] if 0 < i < len(losses) - 1 else 0.0 for i in range(bottom + 1)]
    steepest = min(range(len(slopes)), key=slopes.__getitem__)
    return RateRange(rates, losses, rates[steepest], rates[bottom])
