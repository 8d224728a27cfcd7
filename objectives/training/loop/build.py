"""Build a run from an objective and a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import SequentialSampler

from hpsearch.objectives.errors import ObjectiveError, find_source_file, get_message, wrap_user_errors
from hpsearch.objectives.objective import Objective, overrides
from hpsearch.objectives.training.config import RunPlan, TrainConfig
from hpsearch.objectives.training.data.batches import build_batch_source
from hpsearch.objectives.training.data.dataset import Dataset
from hpsearch.objectives.training.data.folds import Fold
from hpsearch.objectives.training.data.loader import Augment
from hpsearch.objectives.training.data.resplit import ResplitSeed
from hpsearch.objectives.training.data.samplers import EpochOrder
from hpsearch.objectives.training.data.splits import Splits
from hpsearch.objectives.training.data.tree import to_device, to_python_scalars, watch_changes
from hpsearch.objectives.training.evaluation.metrics import Metrics, as_metrics
from hpsearch.objectives.training.evaluation.running_metrics import aggregate_over_ranks
from hpsearch.objectives.training.evaluation.step import bind_forward
from hpsearch.objectives.training.loop.compilation import compile_model
from hpsearch.objectives.training.loop.guards import FiniteGuard
from hpsearch.objectives.training.loop.measure_model import ModelMeasurer, apply_memory_format
from hpsearch.objectives.training.loop.prepare import prepare_splits
from hpsearch.objectives.training.loop.resplit_evaluation import ResplitEvaluation, build_resplit_evaluation
from hpsearch.objectives.training.loop.run import CHECKPOINT_FORMAT, Run
from hpsearch.objectives.training.loop.sanity_checks import check_classes, check_epoch, check_ranks, sanity_check
from hpsearch.objectives.training.loop.step_functions import (
    as_module,
    bind_part_evaluator,
    build_step_function,
    get_forward_call,
)
from hpsearch.objectives.training.loop.steplog import StepLog
from hpsearch.objectives.training.optimizers.averaging import build_average
from hpsearch.objectives.training.optimizers.optimizer import (
    SAM,
    ParameterGroups,
    Precision,
    build_optimizer,
    check_group_settings,
    complete_groups,
    list_groups,
    parameter_groups,
    scale_lr,
)
from hpsearch.objectives.training.optimizers.schedules import build_schedule
from hpsearch.objectives.training.ranks import SINGLE_PROCESS, Ranks
from hpsearch.objectives.training.reproducibility.changes import read_changes
from hpsearch.objectives.training.reproducibility.environment import describe_environment
from hpsearch.objectives.training.reproducibility.seeds import set_seed
from hpsearch.objectives.training.session import Curve
from hpsearch.objectives.training.strategies.base import Strategy
from hpsearch.objectives.training.strategies.ddp import DDPStrategy
from hpsearch.objectives.training.strategies.fsdp import FSDPStrategy

STRATEGIES: dict[str, type[Strategy]] = {kind.name: kind for kind in (DDPStrategy, FSDPStrategy)}

_trained: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()  # by id: parameters of this process's models


def build_run(
    objective: Objective,
    config: TrainConfig,
    plan: RunPlan,
    *,
    device: torch.device,
    ranks: Ranks = SINGLE_PROCESS,
    curve: Curve | None = None,
) -> tuple[Run, dict[str, float]]:
    """Return the run and the scores of its untrained model.

    The function runs every part of the objective's code once, so that errors in this code appear before training.

    Raises:
        ObjectiveError: the objective's data, model, loss or metrics are invalid; the message has file and line.
    """
    ranks.allow_setup()
    owner = type(objective).__name__
    fold = None if plan.fold is None or plan.folds is None else Fold(plan.fold, plan.folds)
    resplit_seed: ResplitSeed = plan.resplit_seed if plan.refit is None else "all"
    splits, split_hash = prepare_splits(objective, plan.split_seed, resplit_seed, fold)
    check_ranks(owner, splits, split_hash, ranks)
    strategy = Strategy(ranks, config) if ranks.is_single_process else STRATEGIES[config.strategy](ranks, config)
    set_seed(plan.seed, "init")
    is_changed = watch_changes(splits.train.x, splits.train.y)
    with wrap_user_errors(f"{owner}.model"):
        model = as_module(objective.model(config, splits.train), "model").to(device)
    if is_changed():
        raise ObjectiveError(
            f"{owner}.model changes the training data in place, and not the validation data; transform the inputs in "
            "the model, as with Standardize.fit(train.x)"
        )
    with wrap_user_errors(f"{owner}.model on the validation split"):
        _initialize_lazy_layers(model, splits.val, device)
    step_function = build_step_function(objective, config, splits, model, device)
    check_classes(objective, splits, step_function)
    metrics, resplit = _make_metrics(objective, splits, plan, device, ranks)
    _check_model(owner, model)
    augment = _make_augment(objective, config, splits.train)
    val = splits.val if resplit is None or resplit.rows is None else splits.val.take(resplit.rows)
    val = val.to(device) if config.num_workers is None else val
    with wrap_user_errors(f"{owner}.sampler"):
        order = _make_order(objective, config, splits.train, plan.seed)
    epoch_steps = order.steps
    total_steps = plan.epochs * epoch_steps
    check_epoch(config, len(splits.train), total_steps, epoch_steps)
    maximize = objective.direction == "maximize"
    apply_memory_format(model, config)
    ranks.broadcast_tensors(model.state_dict().values())  # the initialization may depend on more than seeds
    average = build_average(model, config, plan.epochs)
    steplog = StepLog(model, config.log_every, strategy.gradient_norms)
    strategy.setup_model(model, *average.models)
    optimizer, sam = _make_optimizer(objective, model, config, device, ranks.world_size)
    source = find_source_file(type(objective))
    run = Run(
        identity={
            "format": CHECKPOINT_FORMAT,
            "objective": objective.name,
            "config": config.to_dict(),
            **plan.identity,
            "split_hash": split_hash,
        },
        environment=describe_environment(device, source, ranks.world_size),
        git_diff=read_changes(source),
        config=config,
        plan=plan,
        device=device,
        splits=splits,
        val=val,
        batch_source=build_batch_source(
            splits.train, config, order, seed=plan.seed, device=device, augment=augment, ranks=ranks
        ),
        model=model,
        step_function=step_function,
        evaluate_part=bind_part_evaluator(objective, config),
        metrics=metrics,
        optimizer=optimizer,
        sam=sam,
        schedule=build_schedule(optimizer, config, total_steps, epoch_steps=epoch_steps, maximize=maximize),
        precision=Precision(config.precision, device, cache_casts=strategy.can_cache_casts),
        weight_averaging=average,
        finite_guard=FiniteGuard(device, ranks),
        steplog=steplog,
        curve=curve or Curve(objective.metric, maximize=maximize, keep_last=plan.refit is not None),
        ranks=ranks,
        strategy=strategy,
        measurer=ModelMeasurer(objective, config, get_forward_call(step_function), val, device, ranks, strategy),
        resplit_evaluation=resplit,
    )
    strategy.set_model(model, step_function)
    with strategy.explain_sharding_errors():
        scores = sanity_check(objective, run)
    if config.compile:
        reason = compile_model(
            run.model, run.eval_model, lambda: try_step(run), ranks, by_layer=strategy.compiles_layers
        )
        run.environment["compiled"] = reason is None
        if reason:
            run.resume_notes.append(f"model not compiled: {reason}")
    return run, scores


def _make_metrics(
    objective: Objective, splits: Splits, plan: RunPlan, device: torch.device, ranks: Ranks
) -> tuple[Metrics, ResplitEvaluation | None]:
    """Return the metrics of the validation split, and the evaluation of a run on a new split (None for other runs)."""
    owner, resplit = type(objective).__name__, None
    with wrap_user_errors(f"{owner}.metrics"):
        metrics = as_metrics(objective.metrics(splits.train), objective.metric)
    if plan.resplit_seed is not None and plan.fold is None:
        resplit = build_resplit_evaluation(objective, splits, metrics, plan, device=device, ranks=ranks)
    with wrap_user_errors(f"{owner}.metrics"):
        metrics = aggregate_over_ranks(metrics, ranks)
        if hasattr(metrics, "to"):
            metrics.to(device)
    return metrics, resplit


@torch.no_grad()
def _initialize_lazy_layers(model: nn.Module, val: Dataset, device: torch.device) -> None:
    """Initialize PyTorch's lazy layers by a forward pass of two validation inputs."""
    if any(nn.parameter.is_lazy(parameter) for parameter in model.parameters()):
        x = to_device(val.inputs(slice(0, 2)), device)
        model.eval()
        bind_forward(model, x)(model, x)
        model.train()


def _check_model(owner: str, model: nn.Module) -> None:
    """Reject a model without trainable parameters, with those of an earlier model, or with a state of non-tensors.

    Raises:
        ObjectiveError: the model is rejected, or its `state_dict` raised an error.
    """
    trained = {id(parameter): parameter for parameter in model.parameters() if parameter.requires_grad}
    if not trained:
        raise ObjectiveError(f"{owner}.model has no parameters to train")
    if any(_trained.get(key) is parameter for key, parameter in trained.items()):
        raise ObjectiveError(
            f"{owner}.model returned parameters of an earlier model, which are already trained; "
            "create new ones in each call"
        )
    _trained.update(trained)
    with wrap_user_errors(f"{owner}.model"):
        state = model.state_dict()
    if not isinstance(state, Mapping):
        raise ObjectiveError(f"{owner}.model: state_dict() must return a dictionary, not {type(state).__name__}")
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise ObjectiveError(
                f"{owner}.model has a {type(value).__name__} in its state_dict() at {name!r}; "
                "return a tensor from get_extra_state()"
            )


def _make_augment(objective: Objective, config: TrainConfig, train: Dataset) -> Augment | None:
    """Return the result of the objective's `augment`, after a call with two samples."""
    owner = f"{type(objective).__name__}.augment"
    with wrap_user_errors(owner):
        if (augment := objective.augment(config)) is not None:
            inputs = train.inputs(slice(0, 2))
            augmented = augment(inputs)
            if isinstance(inputs, torch.Tensor) and np.shape(augmented)[:1] != inputs.shape[:1]:
                raise ObjectiveError(f"{owner} must return one input per sample, not {list(np.shape(augmented))}")
    return augment


def _make_optimizer(
    objective: Objective, model: nn.Module, config: TrainConfig, device: torch.device, world_size: int
) -> tuple[Optimizer, SAM | None]:
    groups = _make_groups(objective, model, config)
    scale_lr(groups, config.lr_scaling, world_size)
    optimizer, sam = build_optimizer(model, config, device, groups), None
    if config.optimizer == "sam":
        sam = SAM(optimizer)
        optimizer = sam.base
    if overrides(objective, "parameter_groups"):
        check_group_settings(optimizer)
    return optimizer, sam


def _make_groups(objective: Objective, model: nn.Module, config: TrainConfig) -> ParameterGroups:
    """Return the objective's parameter groups, or the default groups.

    If the objective defines `on_epoch`, the default groups include frozen parameters, because `on_epoch` may unfreeze
    them later.
    """
    with wrap_user_errors(f"{type(objective).__name__}.parameter_groups"):
        own = objective.parameter_groups(model, config)
        if own is not None:
            return complete_groups(model, config, [_convert_settings(group) for group in list_groups(own)])
    if not overrides(objective, "on_epoch"):
        return parameter_groups(model, config)
    frozen = [
        parameter
        for parameter in model.parameters()
        if not parameter.requires_grad and (parameter.is_floating_point() or parameter.is_complex())
    ]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        return parameter_groups(model, config)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _convert_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group with Python's numbers instead of NumPy's, and of a tensor as learning rate.

    A checkpoint cannot hold NumPy's numbers.
    """
    converted = {key: value if key == "params" else to_python_scalars(value) for key, value in group.items()}
    if isinstance(rate := converted.get("lr"), torch.Tensor) and rate.ndim == 0:
        converted["lr"] = rate.item()
    return converted


def _make_order(objective: Objective, config: TrainConfig, train: Dataset, seed: int) -> EpochOrder:
    sampler = objective.sampler(config, train)
    if not train.is_stream:
        return EpochOrder(len(train), config, seed, sampler)
    if sampler is not None:
        raise ObjectiveError("a stream has a fixed order and cannot use a sampler; remove the method sampler()")
    return EpochOrder(len(train), config, seed, SequentialSampler(range(len(train))))


def try_step(run: Run) -> None:
    """Run a forward and a backward pass as a test, and restore the model afterwards.

    The pass is that of the strategy, because the compiler divides a graph at DDP's buckets only if DDP calls the model.
    It reduces no gradients if another rank may have failed.

    Raises:
        ObjectiveError: the model cannot load its own state, for example because a step adds buffers.
    """
    kept = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    batch = next(iter(run.batch_source.iterate_steps(0)))[0].load()
    run.model.train()
    run.strategy.begin_epoch()
    try:
        step = run.strategy.step(batch, run.precision.autocast(), more=not run.strategy.compiles_layers)
        step.loss.backward()  # type: ignore[no-untyped-call]  # torch's
    finally:
        run.model.zero_grad(set_to_none=True)
        try:
            run.model.load_state_dict(kept)
        except RuntimeError as error:  # of PyTorch, in several lines
            fault = " ".join(get_message(error).split())
            raise ObjectiveError(f"the model cannot load its state_dict() after a training step: {fault}") from error
