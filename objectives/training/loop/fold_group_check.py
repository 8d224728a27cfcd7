"""Decide whether the folds of a trial train as one vectorized model: if it equals training in turns, and is faster.

The decision depends on the configuration, the model and the data only, so that another attempt or worker makes the same
one. A timing would not: the two paths differ by rounding errors, and in the random numbers of dropout.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hpsearch.objectives.errors import get_first_line
from hpsearch.objectives.objective import Objective, overrides
from hpsearch.objectives.training.config import TrainConfig
from hpsearch.objectives.training.data.dataset import Batch
from hpsearch.objectives.training.data.tree import tensors
from hpsearch.objectives.training.loop.epoch import set_training_mode
from hpsearch.objectives.training.loop.fold_group import FoldGroup
from hpsearch.objectives.training.loop.run import Run
from hpsearch.objectives.training.loop.stacked_folds import LossModule, StackedFolds, StepOutputs, get_shapes
from hpsearch.objectives.training.reproducibility.seeds import set_seed

# Optimizers of PyTorch that update each value of a parameter independently of its other values.
_OPTIMIZERS = frozenset({"sgd", "adam", "adamw", "nadam", "rmsprop", "adagrad"})
_TOLERANCE = 1e-5  # difference of outputs and gradients, relative to their size
# On a CPU, models of this size were at least 1.7 times as fast as one, and larger ones also slower.
MAX_OPERATIONS = 10_000_000  # floating-point operations of the gradient of one batch of a fold
MAX_PARAMETERS = 100_000
MIN_STEPS = 10_000  # planned steps of all folds; a shorter training does not pay for this check


class _ObstacleError(Exception):
    """Reason for which the folds train in turns."""


def build_fold_group(
    objective: Objective, config: TrainConfig, runs: Sequence[Run], *, is_resumed: bool
) -> tuple[FoldGroup | None, str]:
    """Return the group that trains the folds, or None if they train in turns, and the reason for a log line.

    The runs do not change, except that with a group their models become views of stacked tensors. The function changes
    the state of the random generators.

    Args:
        objective: objective of the runs.
        config: configuration of the runs.
        runs: the runs of the folds, with their last checkpoint.
        is_resumed: whether an earlier attempt trained with a group; then size and equality are not checked again.
    """
    try:
        _check_settings(objective, config, runs[0])
        batches = [next(iter(run.batch_source.iterate_steps(0)))[0].load() for run in runs]
        if any(get_shapes(batch) != get_shapes(batches[0]) for batch in batches):
            raise _ObstacleError("the first batches have different shapes")
        _check_structure(runs)
        for run in runs:
            set_training_mode(run.model)
        is_random = _check_first(runs[0], batches[0])
        if not is_resumed:
            _check_size(runs, batches[0])
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="There is a performance drop")  # for one operation
                folds = StackedFolds(runs, batches)
                if not folds.is_complete:
                    raise _ObstacleError("the forward pass uses a tensor that is neither a parameter nor a buffer")
                if not is_resumed:  # where trained weights give small values, rounding errors are relatively large
                    _check_equality(runs, batches, folds, is_random=is_random)
        except _ObstacleError:
            raise
        except Exception as error:  # PyTorch, or code of the objective within a transformation
            raise _ObstacleError(f"the model or its loss cannot be vectorized: {get_first_line(error)}") from error
        return FoldGroup(runs, folds), "as before the interruption" if is_resumed else "its gradients are equal"
    except _ObstacleError as obstacle:
        return None, str(obstacle)


def _check_settings(objective: Objective, config: TrainConfig, run: Run) -> None:
    obstacles = {
        "vectorize_folds=False": not config.vectorize_folds,
        f"optimizer={config.optimizer!r}": config.optimizer not in _OPTIMIZERS,
        f"precision={config.precision!r}": config.precision != "fp32",
        "compile=True": config.compile,
        "channels_last=True": config.channels_last,
        "activation_checkpointing=True": config.activation_checkpointing,
        f"gradient_accumulation_steps={config.gradient_accumulation_steps}": config.gradient_accumulation_steps > 1,
        "on_epoch() may change the models": overrides(objective, "on_epoch"),
        "the samples are not in memory": config.num_workers is not None or not run.splits.train.in_memory,
    }
    for obstacle, is_present in obstacles.items():
        if is_present:
            raise _ObstacleError(obstacle)


def _check_size(runs: Sequence[Run], batch: Batch) -> None:
    """Reject models that would be slower as one, and trainings that are shorter than the check."""
    steps = sum(run.batch_source.steps * run.plan.epochs for run in runs)
    if steps < MIN_STEPS:
        raise _ObstacleError(f"the training has only {steps} steps of all folds")
    parameters = sum(parameter.numel() for parameter in runs[0].model.parameters())
    if parameters > MAX_PARAMETERS:
        raise _ObstacleError(f"the model is large: {parameters} parameters")
    with FlopCounterMode(display=False) as counter:
        _compute_one(runs[0], batch)
    if counter.get_total_flops() > MAX_OPERATIONS:
        raise _ObstacleError(f"the model is large: {counter.get_total_flops():.2g} operations per batch")


def _check_structure(runs: Sequence[Run]) -> None:
    """Reject models or losses that differ in more than their tensors: only those of the first fold are executed."""
    first, *others = [
        [_describe_module(name, module) for name, module in LossModule(run).named_modules()] for run in runs
    ]
    for other in others:
        if other != first:
            name = next((one[0] for one, two in zip(first, other, strict=False) if one != two), "")
            raise _ObstacleError(f"the folds have different attributes of {name.removeprefix('model.')}")
    groups = [[(group["name"], len(group["params"])) for group in run.optimizer.param_groups] for run in runs]
    if any(other != groups[0] for other in groups):
        raise _ObstacleError("the folds have different parameter groups")


def _describe_module(name: str, module: nn.Module) -> tuple[str, str, dict[str, Any]]:
    values: dict[str, Any] = {}
    for key, value in vars(module).items():
        if value is None or isinstance(value, (bool, int, float, str)):
            values[key] = value
        elif isinstance(value, (list, tuple, dict, set)):
            values[key] = len(value)
    return name, type(module).__qualname__, values  # a class within `model()` is another one for each fold


def _check_first(run: Run, batch: Batch) -> bool:
    """Return whether the gradient of a fold is random.

    Raises:
        _ObstacleError: a forward pass changes more than gradients, which a recorded graph would not repeat.
    """
    module = LossModule(run)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    attributes = [dict(vars(part)) for part in module.modules()]
    before = [_describe_module(name, part) for name, part in module.named_modules()], _read_other_generators()
    try:
        first, second = _compute_one(run, batch), _compute_one(run, batch)
        changed = [name for name, buffer in module.named_buffers() if not torch.equal(buffer, buffers[name])]
    finally:
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])
    if changed:
        raise _ObstacleError(f"the forward pass changes {changed[0].removeprefix('model.')}")
    after = [_describe_module(name, part) for name, part in module.named_modules()], _read_other_generators()
    kept = zip(attributes, map(vars, module.modules()), strict=True)
    is_same = all(one.keys() == two.keys() and all(one[key] is two[key] for key in one) for one, two in kept)
    if before != after or not is_same:
        raise _ObstacleError("the forward pass changes attributes of modules or draws numbers outside of PyTorch")
    return any(not torch.equal(*pair) for pair in zip(first[:-1], second[:-1], strict=True))


def _read_other_generators() -> object:
    _, words, position, *_ = np.random.get_state(legacy=True)
    return random.getstate(), int(position), int(words[0])


def _compute_one(run: Run, batch: Batch) -> list[Tensor]:
    """Return loss, outputs, and all gradients of a fold as one tensor."""
    step = run.strategy.step(batch, nullcontext())
    step.loss.backward()  # type: ignore[no-untyped-call]  # torch's
    gradients = [p.grad for group in run.optimizer.param_groups for p in group["params"]]
    run.model.zero_grad()
    found = [gradient.to_dense().flatten() for gradient in gradients if gradient is not None]
    if len(found) < len(gradients):
        raise _ObstacleError("some parameters have no gradient")
    return [step.loss.detach(), *(tensor.detach() for _, tensor in tensors(step.outputs)), torch.cat(found)]


def _check_equality(runs: Sequence[Run], batches: Sequence[Batch], folds: StackedFolds, *, is_random: bool) -> None:
    """Compare the recorded gradients with those of each fold; random layers are turned off for one of the comparisons.

    Raises:
        _ObstacleError: outputs or gradients differ.
    """
    inputs = folds.stack(batches)
    with torch.no_grad():
        set_seed("vectorized folds")
        recorded = folds.compute(*inputs)
        set_seed("vectorized folds")
        found = folds.compute_unrecorded(*inputs)
        for pair in zip(_split(recorded), _split(found), strict=True):
            _require_equal(*pair)
    if is_random:
        for run in runs:
            run.model.eval()
        found = folds.compute_unrecorded(*inputs)
    for run, batch, own in zip(runs, batches, _split(found), strict=True):
        _require_equal(own, _compute_one(run, batch))
        set_training_mode(run.model)


def _split(found: StepOutputs) -> list[tuple[Tensor, ...]]:
    """Return loss, outputs, and all gradients as one tensor for each fold."""
    gradients = torch.cat([each.reshape(len(each), -1) for each in found.gradients], dim=1)
    return list(zip(found.losses, *(tensor for _, tensor in tensors(found.outputs)), gradients, strict=True))


def _require_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    names = ["outputs"] * (len(expected) - 1) + ["gradients"]
    for name, one, other in zip(names, found, expected, strict=True):
        difference = float(torch.linalg.vector_norm((one - other).double()))
        size = float(torch.linalg.vector_norm(other.double()))
        if not difference <= _TOLERANCE * size:
            raise _ObstacleError(f"the {name} of one batch differ by {difference / size if size else difference:.1g}")
