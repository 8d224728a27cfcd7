"""Functions of a run that call the objective: its loss or its custom `step`, `evaluate` and `export`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from hpsearch.objectives.errors import ObjectiveError, wrap_user_errors
from hpsearch.objectives.objective import Objective, overrides
from hpsearch.objectives.training.config import TrainConfig
from hpsearch.objectives.training.data.dataset import Batch, Dataset
from hpsearch.objectives.training.data.splits import Splits
from hpsearch.objectives.training.evaluation.ensemble import Ensemble
from hpsearch.objectives.training.evaluation.evaluate import PartEvaluator, as_floats
from hpsearch.objectives.training.evaluation.losses import as_additive_loss
from hpsearch.objectives.training.evaluation.model_state import reject_changes
from hpsearch.objectives.training.evaluation.step import (
    ForwardCall,
    LossStep,
    Step,
    StepFunction,
    bind_forward,
    call_single,
)
from hpsearch.objectives.training.result import ExportableModel
from hpsearch.objectives.training.serving_module import make_exportable


class CustomStep:
    """Step function that calls the objective's `step` and checks its result."""

    def __init__(self, objective: Objective, config: TrainConfig) -> None:
        self._objective, self._config = objective, config

    def __call__(self, model: nn.Module, batch: Batch, autocast: AbstractContextManager[None] | None = None) -> Step:
        """Return the `Step` of a batch.

        Raises:
            ObjectiveError: the result is not a Step, or its loss is not a scalar or one value per sample.
        """
        owner = f"{type(self._objective).__name__}.step"
        with wrap_user_errors(owner), autocast or nullcontext():
            step = self._objective.step(model, batch, self._config)
        if not isinstance(step, Step):
            raise ObjectiveError(f"{owner} must return a Step, not {type(step).__name__}")
        if not isinstance(step.loss, Tensor):
            raise ObjectiveError(f"{owner}: the loss of the Step must be a tensor, not {type(step.loss).__name__}")
        loss = step.loss.float()
        if loss.ndim and loss.shape != (batch.size,):
            raise ObjectiveError(f"{owner}: the loss must have shape [{batch.size}] or [], not {list(loss.shape)}")
        targets = batch.y if step.targets is None else step.targets
        return Step(loss.mean(), step.outputs, targets, step.metrics, step.weight)


def build_step_function(
    objective: Objective, config: TrainConfig, splits: Splits, model: nn.Module, device: torch.device
) -> StepFunction:
    """Return the step function of an objective for a model on `device`.

    Raises:
        ObjectiveError: the objective's loss is invalid, or the model cannot be called with its inputs.
    """
    if overrides(objective, "step"):
        return CustomStep(objective, config)
    with wrap_user_errors(f"{type(objective).__name__}.loss"):
        loss = as_module(objective.loss(config, splits.train), "loss")
        loss = as_additive_loss(loss, splits.train.y, splits.val.y).to(device)
    return LossStep(loss, bind_forward(model, splits.val.inputs(slice(0, 2))))


def bind_part_evaluator(objective: Objective, config: TrainConfig) -> PartEvaluator | None:
    """Return a function that calls `Objective.evaluate` and checks its result; None if it is not overridden.

    The function raises an ObjectiveError if the result is wrong, or if `evaluate` changes the model: the trained
    weights would depend on the evaluation.
    """
    if not overrides(objective, "evaluate"):
        return None
    owner = f"{type(objective).__name__}.evaluate"

    def evaluate_part(model: nn.Module, part: Dataset) -> Mapping[str, float]:
        with wrap_user_errors(owner):
            with reject_changes(model, owner):
                found = objective.evaluate(model, part, config)
            if not isinstance(found, Mapping):
                raise ObjectiveError(
                    f"{owner} must return a dict such as {{'distance': 1.5}}, not {type(found).__name__}"
                )
            return as_floats(found)

    return evaluate_part


def bind_export(objective: Objective, config: TrainConfig) -> Callable[[nn.Module], ExportableModel] | None:
    """Return a function that calls `Objective.export` and checks its result; None if it is not overridden.

    The models of an `Ensemble` are exported one by one, and their outputs are averaged.
    """
    if not overrides(objective, "export"):
        return None
    owner = f"{type(objective).__name__}.export"

    def export(model: nn.Module) -> ExportableModel:
        if isinstance(model, Ensemble):
            exported = [export(member) for member in model.models]
            return exported[0]._replace(module=Ensemble([member.module for member in exported]).eval())
        with wrap_user_errors(owner):
            found = objective.export(model, config)
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], nn.Module):
            raise ObjectiveError(f"{owner} must return a module and its example inputs, not {type(found).__name__}")
        module, x = found
        module.eval()  # not chained: a custom `train` may return None
        wrapped, parts = make_exportable(module, bind_forward(module, x), x)
        if not parts or any(part.ndim < 1 or len(part) < 2 for _, part in parts):
            raise ObjectiveError(f"{owner} must return inputs with at least two samples")
        return ExportableModel(wrapped, parts, [frozenset({0})] * len(parts), owner)

    return export


def get_forward_call(step_function: StepFunction) -> ForwardCall:
    """Return the function that calls the model of a run with a batch of inputs."""
    return step_function.call if isinstance(step_function, LossStep) else call_single


def as_module(value: object, what: str) -> nn.Module:
    """Return `value` if it is a module; error messages name the objective's method `what`, which returned it.

    Raises:
        ObjectiveError: the value is not a module.
    """
    if not isinstance(value, nn.Module):
        raise ObjectiveError(f"{what}() must return a torch.nn.Module, not {type(value).__name__}")
    return value
