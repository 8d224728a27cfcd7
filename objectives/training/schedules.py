"""Learning-rate schedules by name, in optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

if TYPE_CHECKING:
    from objectives.training.config import TrainConfig


@dataclass(frozen=True)
class Plan:
    """The length of a run in optimizer steps, counted by those that are really taken."""

    total_steps: int
    warmup_steps: int

    @classmethod
    def of(cls, config: TrainConfig, total_steps: int) -> Plan:
        """The plan of a configuration: warm-up never takes the whole run."""
        steps = config.warmup_steps
        if steps is None:
            steps = round(config.warmup_fraction * total_steps)
        return cls(total_steps, min(steps, max(total_steps - 1, 0)))


# A factory makes the scheduler that is stepped once after every optimizer step.
Factory = Callable[[Optimizer, "TrainConfig", Plan], LRScheduler]


def _multiplier(decay: Callable[[float, TrainConfig], float]) -> Factory:
    """A schedule as a factor on each group's own rate: (step + 1) / warmup while it climbs, then `decay`.

    The factor is a pure function of the step, so a resumed schedule is exact, and groups keep their ratios.
    `decay(progress, config)` has progress in [0, 1); at 0 it is 1.
    """

    def build(optimizer: Optimizer, config: TrainConfig, plan: Plan) -> LRScheduler:
        length = max(plan.total_steps - plan.warmup_steps, 1)

        def factor(step: int) -> float:
            if step < plan.warmup_steps:
                return (step + 1) / plan.warmup_steps
            return decay(min((step - plan.warmup_steps) / length, 1.0), config)

        return LambdaLR(optimizer, factor)

    return build


def _floor(share: float, config: TrainConfig) -> float:
    return config.min_lr_fraction + (1 - config.min_lr_fraction) * share


def _cosine(progress: float, config: TrainConfig) -> float:
    return _floor(0.5 * (1 + math.cos(math.pi * progress)), config)


def _linear(progress: float, config: TrainConfig) -> float:
    return _floor(1 - progress, config)


def _exponential(progress: float, config: TrainConfig) -> float:
    return math.pow(max(config.min_lr_fraction, 1e-3), progress)


def _constant(_progress: float, _config: TrainConfig) -> float:
    return 1.0


def _one_cycle(optimizer: Optimizer, _config: TrainConfig, plan: Plan) -> LRScheduler:
    """Smith's 1-cycle, as OneCycleLR lays it out: from 1/25 of the peak up to it, then down to 1/250,000.

    The climb takes 30 % of the run, or the warm-up where that is longer. OneCycleLR itself divides by zero in very
    short runs, raises one step past its end, and cycles momentum.
    """
    low, end = 1 / 25, 1 / 25e4
    peak = max(0.3 * plan.total_steps, plan.warmup_steps) - 1

    def factor(step: int) -> float:
        if step <= peak:
            return _between(low, 1.0, step / peak if peak > 0 else 1.0)
        return _between(1.0, end, min((step - peak) / max(plan.total_steps - 1 - peak, 1), 1.0))

    return LambdaLR(optimizer, factor)


def _between(start: float, stop: float, progress: float) -> float:
    """From `start` to `stop` along half a cosine."""
    return stop + (start - stop) / 2 * (1 + math.cos(math.pi * progress))


SCHEDULES: dict[str, Factory] = {
    "constant": _multiplier(_constant),
    "cosine": _multiplier(_cosine),
    "linear": _multiplier(_linear),
    "exponential": _multiplier(_exponential),
    "one_cycle": _one_cycle,
}


def build_schedule(optimizer: Optimizer, config: TrainConfig, total_steps: int) -> LRScheduler:
    """The configured schedule over `total_steps` optimizer steps."""
    return SCHEDULES[config.schedule](optimizer, config, Plan.of(config, total_steps))
