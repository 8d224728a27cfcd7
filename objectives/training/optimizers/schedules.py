"""Learning-rate schedules, which change the learning rates after optimizer steps and epochs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.config import TrainConfig


@dataclass(frozen=True)
class ScheduleLength:
    """Lengths of a run, its warm-up and an epoch, in optimizer steps that loss scaling does not skip."""

    total_steps: int
    warmup_steps: int
    epoch_steps: int


class Schedule:
    """Schedule whose factor on the initial learning rate of each group depends only on the optimizer step.

    Therefore a resumed schedule is exact, the ratios between groups do not change, and steps after the end of the run
    are allowed.
    """

    def __init__(self, optimizer: Optimizer, factor: Callable[[int], float]) -> None:
        self._optimizer, self._factor = optimizer, factor
        self._base_lrs = [group.setdefault("initial_lr", group["lr"]) for group in optimizer.param_groups]
        self._move_to(0, [factor(0)] * len(self._base_lrs))

    def step(self) -> None:
        """Update the learning rates after an optimizer step that was not skipped."""
        step = self._steps + 1
        self._move_to(step, [self._factor(step)] * len(self._base_lrs))

    def end_epoch(self, value: float) -> None:
        """Update the learning rates after an epoch with `value`, the objective's validation metric."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values."""
        return {"steps": {"last_epoch": self._steps, "base_lrs": self._base_lrs}}  # as in PyTorch's LambdaLR

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`; the learning rates are in the optimizer's state."""
        self._steps, self._base_lrs = state["steps"]["last_epoch"], state["steps"]["base_lrs"]

    def continue_at(self, step: int, state: dict[str, Any], rates: Sequence[float]) -> None:  # noqa: ARG002 of _Plateau
        """Continue the schedule of another configuration, with the initial learning rates of this one.

        Args:
            step: number of optimizer steps so far, with this configuration's steps per finished epoch.
            state: result of `state_dict` with the other configuration.
            rates: the current learning rates of the other configuration, relative to their initial ones, by group.
        """
        self._move_to(step, [self._factor(step)] * len(rates))

    def _move_to(self, step: int, factors: Sequence[float]) -> None:
        self._steps = step
        for group, initial, factor in zip(self._optimizer.param_groups, self._base_lrs, factors, strict=True):
            group["lr"] = initial * factor


class _Plateau(Schedule):
    """Schedule with a warm-up, and then reductions when the validation metric stops improving (ReduceLROnPlateau)."""

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
            eps=0.0,  # the default stops reductions below 1e-8
            min_lr=[group["initial_lr"] * config.min_lr_fraction for group in optimizer.param_groups],
        )

    def step(self) -> None:
        # After the warm-up, the factor would undo the reductions.
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

    def continue_at(self, step: int, state: dict[str, Any], rates: Sequence[float]) -> None:
        for key in ("best", "num_bad_epochs", "cooldown_counter", "last_epoch"):
            setattr(self._plateau, key, state["plateau"][key])
        self._seen = step
        self._move_to(min(step, self._warmup), rates if step >= self._warmup else [self._factor(step)] * len(rates))


def _warmup_factor(step: int, config: TrainConfig, plan: ScheduleLength) -> float:
    """Return a factor that rises from 1/steps to 1, linearly or along half a cosine."""
    if step >= plan.warmup_steps:
        return 1.0
    share = (step + 1) / plan.warmup_steps
    return share if config.warmup == "linear" else 0.5 * (1 - math.cos(math.pi * share))


def _scale_above_floor(share: float, config: TrainConfig) -> float:
    return config.min_lr_fraction + (1 - config.min_lr_fraction) * share


def _cosine(step: int, length: int, config: TrainConfig, _plan: ScheduleLength) -> float:
    return _scale_above_floor(0.5 * (1 + math.cos(math.pi * step / length)), config)


def _cosine_restarts(step: int, length: int, config: TrainConfig, plan: ScheduleLength) -> float:
    """Return the factor of `cycles` cosine cycles of equal length (Loshchilov and Hutter 2017)."""
    cycle = math.ceil(length / config.cycles)
    return _cosine(step % cycle if step < length else cycle, cycle, config, plan)


def _step(step: int, _length: int, config: TrainConfig, plan: ScheduleLength) -> float:
    """Return a factor that is multiplied by `decay_factor` every `decay_epochs` epochs of the run, as in StepLR."""
    epochs = (step + plan.warmup_steps) // plan.epoch_steps
    decay_epochs = config.decay_epochs or max(math.ceil(plan.total_steps / plan.epoch_steps / 3), 1)
    return max(config.decay_factor ** (epochs // decay_epochs), config.min_lr_fraction)


def _one_cycle(step: int, plan: ScheduleLength) -> float:
    """Return the factor of Smith's 1-cycle with the values of OneCycleLR: from 1/25 up to 1, then down to 1/250,000.

    The rise takes 30 % of the run, or the warm-up if that is longer. OneCycleLR is not used because it divides by zero
    in very short runs, raises an error after its last step, uses one rate for all groups, and changes the momentum.
    """
    low, end = 1 / 25, 1 / 25e4
    peak = max(0.3 * plan.total_steps, plan.warmup_steps) - 1
    if step <= peak:
        return _interpolate_cosine(low, 1.0, step / peak if peak > 0 else 1.0)
    return _interpolate_cosine(1.0, end, min((step - peak) / max(plan.total_steps - 1 - peak, 1), 1.0))


def _interpolate_cosine(start: float, stop: float, progress: float) -> float:
    """Interpolate from `start` to `stop` along half a cosine."""
    return stop + (start - stop) / 2 * (1 + math.cos(math.pi * progress))


# Factor on the peak rate at `step` of `length` steps after the warm-up; 1 at step 0.
_DECAYS: dict[str, Callable[[int, int, TrainConfig, ScheduleLength], float]] = {
    "constant": lambda *_: 1.0,
    "cosine": _cosine,
    "cosine_restarts": _cosine_restarts,
    "linear": lambda step, length, config, _: _scale_above_floor(1 - step / length, config),
    # PolynomialLR has no minimum rate.
    "polynomial": lambda step, length, config, _: _scale_above_floor((1 - step / length) ** config.power, config),
    "exponential": lambda step, length, config, _: math.pow(max(config.min_lr_fraction, 1e-3), step / length),
    "step": _step,
}


def build_schedule(
    optimizer: Optimizer, config: TrainConfig, total_steps: int, *, epoch_steps: int = 1, maximize: bool = True
) -> Schedule:
    """Return the configured schedule of a run. The warm-up is at least one step shorter than the run.

    Args:
        optimizer: optimizer whose learning rates the schedule sets.
        config: configuration of the run.
        total_steps: optimizer steps of the run.
        epoch_steps: optimizer steps of an epoch.
        maximize: whether a higher metric in `end_epoch` is better.
    """
    warmup = round(config.warmup_fraction * total_steps) if config.warmup_steps is None else config.warmup_steps
    plan = ScheduleLength(total_steps, min(warmup, max(total_steps - 1, 0)), epoch_steps)
    if config.schedule == "plateau":
        return _Plateau(optimizer, config, plan, maximize=maximize)
    if config.schedule == "one_cycle":
        return Schedule(optimizer, lambda step: _one_cycle(step, plan))
    decay, length = _DECAYS[config.schedule], max(total_steps - plan.warmup_steps, 1)

    def compute_factor(step: int) -> float:
        if step < plan.warmup_steps:
            return _warmup_factor(step, config, plan)
        return decay(min(step - plan.warmup_steps, length), length, config, plan)

    return Schedule(optimizer, compute_factor)


def check_length(config: TrainConfig, *, total_steps: int, epoch_steps: int) -> None:
    """Reject a schedule whose warm-up, decay or cycle is longer than the run.

    Raises:
        ObjectiveError: a setting exceeds the length of the run; the message has the setting.
    """
    epochs = total_steps // epoch_steps
    if (steps := config.warmup_steps) is not None and steps >= total_steps:
        raise ObjectiveError(f"warmup_steps must be below {total_steps} (all steps), not {steps}; use warmup_fraction")
    if config.schedule == "step" and config.decay_epochs is not None and config.decay_epochs >= epochs:
        raise ObjectiveError(f"decay_epochs must be below epochs ({epochs}), not {config.decay_epochs}; lower it")
    if config.schedule == "cosine_restarts" and config.cycles > total_steps:
        raise ObjectiveError(f"cycles must be at most the run's {total_steps} steps, not {config.cycles}; lower it")
