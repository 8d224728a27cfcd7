"""The step of a run: the loss of the model's outputs, or what the objective makes of a batch itself."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from hpsearch.objectives.errors import ObjectiveError, wrap_user_errors
from hpsearch.objectives.objective import Objective, overrides
from hpsearch.objectives.training.config import TrainConfig
from hpsearch.objectives.training.data.dataset import Batch
from hpsearch.objectives.training.data.splits import Splits
from hpsearch.objectives.training.evaluation.losses import as_additive_loss
from hpsearch.objectives.training.evaluation.step import Call, LossStep, Step, StepFunction, bind_forward, call_single


class CustomStep:
    """The step that an objective defines."""

    def __init__(self, objective: Objective, config: TrainConfig) -> None:
        self._objective, self._config = objective, config

    def __call__(self, model: nn.Module, batch: Batch, autocast: AbstractContextManager[None] | None = None) -> Step:
        """The step of a batch."""
        who = f"{type(self._objective).__name__}.step"
        with wrap_user_errors(who), autocast or nullcontext():
            step = self._objective.step(model, batch, self._config)
        if not isinstance(step, Step):
            raise ObjectiveError(f"{who} must return a Step, not {type(step).__name__}")
        if not isinstance(step.loss, Tensor):
            raise ObjectiveError(f"{who}: the loss of its Step must be a tensor, not {type(step.loss).__name__}")
        loss = step.loss.float()
        if loss.ndim and loss.shape != (batch.size,):
            raise ObjectiveError(f"{who} gave a loss {list(loss.shape)} for {batch.size} samples, not [n] or the mean")
        targets = batch.y if step.targets is None else step.targets
        return Step(loss.mean(), step.outputs, targets, step.metrics, step.weight)


def build_step_function(
    objective: Objective, config: TrainConfig, splits: Splits, model: nn.Module, device: torch.device
) -> StepFunction:
    """The step of an objective over a model that is on `device`.

    Raises:
        ObjectiveError: the objective's loss is none, or the model does not take its inputs.
    """
    if overrides(objective, "step"):
        return CustomStep(objective, config)
    with wrap_user_errors(f"{type(objective).__name__}.loss"):
        loss = as_module(objective.loss(config, splits.train), "loss")
        loss = as_additive_loss(loss, splits.train.y, splits.val.y).to(device)
    return LossStep(loss, bind_forward(model, splits.val.inputs(slice(0, 2))))


def forward_call(step_function: StepFunction) -> Call:
    """How the model of a run is called with its inputs."""
    return step_function.call if isinstance(step_function, LossStep) else call_single


def as_module(value: object, what: str) -> nn.Module:
    """The value, which is to be a module.

    Raises:
        ObjectiveError: it is not.
    """
    if not isinstance(value, nn.Module):
        raise ObjectiveError(f"{what}() must return a torch.nn.Module, not {type(value).__name__}")
    return value
