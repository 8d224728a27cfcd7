"""Learning-rate schedules by name: what moves the rate after an optimizer step, and after an epoch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.config import TrainConfig


@dataclass(frozen=True)
class ScheduleLength:
    """The length of a run in optimizer steps, without those that loss scaling skips."""

    total_steps: int
    warmup_steps: int
    epoch_steps: int


class Schedule:
    """A schedule in steps: the factor on each group's own rate is a pure function of the step.

    Therefore a resumed schedule is exact, groups keep their ratios, and a step past the end does no harm.
    """

    def __init__(self, optimizer: Optimizer, factor: Callable[[int], float]) -> None:
        self._steps = LambdaLR(optimizer, factor)

    def step(self) -> None:
        """After an optimizer step that ran."""
        self._steps.step()

    def end_epoch(self, value: float) -> None:
        """After a validation, with the objective's metric."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"steps": self._steps.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` gave; the rates themselves are in the optimizer's state."""
        self._steps.load_state_dict(state["steps"])


class _Plateau(Schedule):
    """A schedule that climbs during the warm-up, then falls when the validation metric stalls (ReduceLROnPlateau)."""

    def __init__(self, optimizer: Optimizer, config: TrainConfig, plan: ScheduleLength, *, maximize: bool) -> None:
        super().__init__(optimizer, lambda step: _warmup_factor(step, config, plan))
        self._warmup = plan.warmup_steps
        self._seen = 0
        self._plateau = ReduceLROnPlateau(
            optimizer,
            mode="max" if maximize else "min",
            factor=config.decay_factor,
            patience=config.plateau_patience,
            threshold=0.0,
            eps=0.0,  # the default leaves rates below 1e-8 alone
            min_lr=[group["initial_lr"] * config.min_lr_fraction for group in optimizer.param_groups],
        )

    def step(self) -> None:
        # Only the warm-up goes by steps, because LambdaLR would undo the reductions.
        self._seen += 1
        if self._seen <= self._warmup:
            super().step()

    def end_epoch(self, value: float) -> None:
        if self._seen >= self._warmup:
            self._plateau.step(value)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "plateau": self._plateau.state_dict(), "seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._plateau.load_state_dict(state["plateau"])
        self._seen = state["seen"]


def _warmup_factor(step: int, config: TrainConfig, plan: ScheduleLength) -> float:
    """From 1/steps up to 1, never from 0: along a line, or half a cosine."""
    if step >= plan.warmup_steps:
        return 1.0
    share = (step + 1) / plan.warmup_steps
    return share if config.warmup == "linear" else 0.5 * (1 - math.cos(math.pi * share))


def _scale_above_floor(share: float, config: TrainConfig) -> float:
    return config.min_lr_fraction + (1 - config.min_lr_fraction) * share


def _cosine(step: int, length: int, config: TrainConfig, _plan: ScheduleLength) -> float:
    return _scale_above_floor(0.5 * (1 + math.cos(math.pi * step / length)), config)


def _cosine_restarts(step: int, length: int, config: TrainConfig, plan: ScheduleLength) -> float:
    """As CosineAnnealingWarmRestarts: `cycles` cosines of one length (Loshchilov and Hutter 2017)."""
    cycle = math.ceil(length / config.cycles)
    return _cosine(step % cycle if step < length else cycle, cycle, config, plan)


def _step(step: int, _length: int, config: TrainConfig, plan: ScheduleLength) -> float:
    """As StepLR by epochs: times `decay_factor` after each `decay_epochs`, counted from the start of the run."""
    epochs = (step + plan.warmup_steps) // plan.epoch_steps
    decay_epochs = config.decay_epochs or max(math.ceil(plan.total_steps / plan.epoch_steps / 3), 1)
    return max(config.decay_factor ** (epochs // decay_epochs), config.min_lr_fraction)


def _one_cycle(step: int, plan: ScheduleLength) -> float:
    """Smith's 1-cycle, as OneCycleLR lays it out: from 1/25 of the peak up to it, then down to 1/250,000.

    The climb takes 30 % of the run, or the warm-up where that is longer. OneCycleLR itself divides by zero in very
    short runs, raises one step past its end, flattens the rates of groups, and cycles momentum.
    """
    low, end = 1 / 25, 1 / 25e4
    peak = max(0.3 * plan.total_steps, plan.warmup_steps) - 1
    if step <= peak:
        return _interpolate_cosine(low, 1.0, step / peak if peak > 0 else 1.0)
    return _interpolate_cosine(1.0, end, min((step - peak) / max(plan.total_steps - 1 - peak, 1), 1.0))


def _interpolate_cosine(start: float, stop: float, progress: float) -> float:
    """From `start` to `stop` along half a cosine."""
    return stop + (start - stop) / 2 * (1 + math.cos(math.pi * progress))


# The factor on the peak rate `step` steps after the warm-up, of `length` such steps; at 0 it is 1.
_DECAYS: dict[str, Callable[[int, int, TrainConfig, ScheduleLength], float]] = {
    "constant": lambda *_: 1.0,
    "cosine": _cosine,
    "cosine_restarts": _cosine_restarts,
    "linear": lambda step, length, config, _: _scale_above_floor(1 - step / length, config),
    # PolynomialLR has no rate to end at.
    "polynomial": lambda step, length, config, _: _scale_above_floor((1 - step / length) ** config.power, config),
    "exponential": lambda step, length, config, _: math.pow(max(config.min_lr_fraction, 1e-3), step / length),
    "step": _step,
}


def build_schedule(
    optimizer: Optimizer, config: TrainConfig, total_steps: int, *, epoch_steps: int = 1, maximize: bool = True
) -> Schedule:
    """Return the configured schedule over a run.

    `maximize` says whether the metric given to `end_epoch` is better when higher. The warm-up is shorter than the run.
    """
    warmup = round(config.warmup_fraction * total_steps) if config.warmup_steps is None else config.warmup_steps
    plan = ScheduleLength(total_steps, min(warmup, max(total_steps - 1, 0)), epoch_steps)
    if config.schedule == "plateau":
        return _Plateau(optimizer, config, plan, maximize=maximize)
    if config.schedule == "one_cycle":
        return Schedule(optimizer, lambda step: _one_cycle(step, plan))
    decay, length = _DECAYS[config.schedule], max(total_steps - plan.warmup_steps, 1)

    def factor(step: int) -> float:
        if step < plan.warmup_steps:
            return _warmup_factor(step, config, plan)
        return decay(min(step - plan.warmup_steps, length), length, config, plan)

    return Schedule(optimizer, factor)


def check_length(config: TrainConfig, *, total_steps: int, epoch_steps: int) -> None:
    """Reject a schedule whose warm-up, decay or cycle is longer than the run."""
    epochs = total_steps // epoch_steps
    if config.warmup_steps is not None and config.warmup_steps >= total_steps:
        raise ObjectiveError(
            f"warmup_steps {config.warmup_steps} is longer than the run of {total_steps} steps: set warmup_fraction"
        )
    if config.schedule == "step" and config.decay_epochs is not None and config.decay_epochs >= epochs:
        raise ObjectiveError(f"decay_epochs {config.decay_epochs} is no less than the run's {epochs} epochs: lower it")
    if config.schedule == "cosine_restarts" and config.cycles > total_steps:
        raise ObjectiveError(f"cycles {config.cycles} is more than the {total_steps} steps of the run: lower it")
