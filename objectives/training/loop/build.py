"""Build a run from an objective and a configuration."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import SequentialSampler

from hpsearch.objectives.errors import ObjectiveError, source_file, users_code
from hpsearch.objectives.objective import Objective, overrides
from hpsearch.objectives.training.config import RunPlan, TrainConfig
from hpsearch.objectives.training.data.batches import build_feed
from hpsearch.objectives.training.data.dataset import Dataset
from hpsearch.objectives.training.data.samplers import Order
from hpsearch.objectives.training.data.splits import Splits
from hpsearch.objectives.training.data.tree import moved
from hpsearch.objectives.training.evaluation.metrics import Metrics, as_metrics
from hpsearch.objectives.training.evaluation.running import over_ranks
from hpsearch.objectives.training.evaluation.step import call_of
from hpsearch.objectives.training.loop.fresh import Fresh, build_fresh
from hpsearch.objectives.training.loop.guards import FiniteGuard
from hpsearch.objectives.training.loop.measuring import Measuring, compiled, layout
from hpsearch.objectives.training.loop.prepared import prepared_splits
from hpsearch.objectives.training.loop.rehearsal import check_classes, check_epoch, check_ranks, rehearse
from hpsearch.objectives.training.loop.run import FORMAT, Run
from hpsearch.objectives.training.loop.steplog import StepLog
from hpsearch.objectives.training.loop.stepping import as_module, build_stepping, call_in
from hpsearch.objectives.training.optimizers.averaging import build_average
from hpsearch.objectives.training.optimizers.optimizer import (
    Groups,
    Precision,
    Sharpness,
    build_optimizer,
    checked_groups,
    parameter_groups,
)
from hpsearch.objectives.training.optimizers.schedules import build_schedule
from hpsearch.objectives.training.ranks import ALONE, Ranks
from hpsearch.objectives.training.reproducibility.environment import environment, uncommitted
from hpsearch.objectives.training.reproducibility.seeds import set_seed
from hpsearch.objectives.training.session import Curve
from hpsearch.objectives.training.strategies.base import Replicated, Strategy
from hpsearch.objectives.training.strategies.fsdp import Sharded

STRATEGIES: dict[str, type[Strategy]] = {kind.name: kind for kind in (Replicated, Sharded)}


# What the peak rate is multiplied by on so many devices (Goyal et al. 2017; Krizhevsky 2014).
_SCALINGS: dict[str, Callable[[int], float]] = {"none": lambda _: 1.0, "linear": float, "sqrt": math.sqrt}


def build(
    objective: Objective,
    config: TrainConfig,
    plan: RunPlan,
    *,
    device: torch.device,
    ranks: Ranks = ALONE,
    curve: Curve | None = None,
) -> tuple[Run, dict[str, float]]:
    """The run, and what its untrained model scores.

    Every part of the objective's code has run once when this returns, so its mistakes show before training.

    Raises:
        ObjectiveError: the objective's data, model, loss or metrics are wrong; the message has its file and line.
    """
    who = type(objective).__name__
    splits, split_hash = prepared_splits(objective, plan.split_seed, plan.division if plan.refit is None else "all")
    check_ranks(who, splits, split_hash, ranks)
    strategy = Strategy(ranks, config) if ranks.alone else STRATEGIES[config.strategy](ranks, config)
    set_seed(plan.seed, "init")
    with users_code(f"{who}.model"):
        model = as_module(objective.model(config, splits.train), "model").to(device)
    with users_code(f"{who}.model on the validation split"):
        _materialise(model, splits.val, device)
    stepping = build_stepping(objective, config, splits, model, device)
    check_classes(objective, splits, stepping)
    metrics, fresh = _metrics(objective, splits, plan, device, ranks)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ObjectiveError(f"{who}.model has no parameters to train")
    with users_code(f"{who}.augment"):
        augment = objective.augment(config)
        if augment is not None:
            augment(splits.train.inputs(slice(0, 2)))
    val = splits.val if fresh is None or fresh.rows is None else splits.val.take(fresh.rows)
    val = val.to(device) if config.num_workers is None else val
    with users_code(f"{who}.sampler"):
        order = _order(objective, config, splits.train, plan.seed)
    epoch_steps = order.steps
    total_steps = plan.epochs * epoch_steps
    check_epoch(config, len(splits.train), total_steps, epoch_steps)
    maximize = objective.direction == "maximize"
    layout(model, config)
    ranks.copy_first(model.state_dict().values())  # a model may draw from what no seed reaches
    average, steplog = build_average(model, config, plan.epochs), StepLog(model, config.log_every, strategy.norms)
    strategy.place(model, *average.models)
    groups = _groups(objective, model, config)
    for group in groups:
        group["lr"] *= _SCALINGS[config.lr_scaling](ranks.world)
    optimizer, sharpness = build_optimizer(model, config, device, groups), None
    if config.optimizer == "sam":
        sharpness = Sharpness(optimizer)
        optimizer = sharpness.base
    source = source_file(type(objective))
    run = Run(
        identity={
            "format": FORMAT,
            "objective": objective.name,
            "config": config.to_dict(),
            **plan.identity,
            "split_hash": split_hash,
        },
        environment=environment(device, source, ranks.world),
        changes=uncommitted(source.parent if source else Path.cwd()),
        config=config,
        plan=plan,
        device=device,
        splits=splits,
        val=val,
        feed=build_feed(splits.train, config, order, seed=plan.seed, device=device, augment=augment, ranks=ranks),
        model=model,
        stepping=stepping,
        metrics=metrics,
        optimizer=optimizer,
        sharpness=sharpness,
        schedule=build_schedule(optimizer, config, total_steps, epoch_steps=epoch_steps, maximize=maximize),
        precision=Precision(config.precision, device),
        average=average,
        guard=FiniteGuard(device),
        steplog=steplog,
        curve=curve or Curve(objective.metric, maximize=maximize, keep_last=plan.refit is not None),
        ranks=ranks,
        strategy=strategy,
        measuring=Measuring(objective, config, call_in(stepping), val, device, ranks, strategy),
        fresh=fresh,
    )
    strategy.begin(model, stepping)
    with strategy.explained():
        scores = rehearse(objective, run)
    if config.compile:
        why = compiled(run.model, run.judged, lambda: _trial_step(run))
        run.environment["compiled"] = why is None
        if why:
            run.notes.append(f"not compiled: {why}")
    return run, scores


def _metrics(
    objective: Objective, splits: Splits, plan: RunPlan, device: torch.device, ranks: Ranks
) -> tuple[Metrics, Fresh | None]:
    """What the validation split is judged by; of a run on a fresh division its halves, too."""
    who, fresh = type(objective).__name__, None
    with users_code(f"{who}.metrics"):
        metrics = as_metrics(objective.metrics(splits.train), objective.metric)
    if plan.division is not None:
        fresh = build_fresh(objective, splits, metrics, plan, device=device, ranks=ranks)
    with users_code(f"{who}.metrics"):
        metrics = over_ranks(metrics, ranks)
        if hasattr(metrics, "to"):
            metrics.to(device)
    return metrics, fresh


@torch.no_grad()
def _materialise(model: nn.Module, val: Dataset, device: torch.device) -> None:
    """Gives lazy layers their parameters, by a look at some inputs."""
    if any(nn.parameter.is_lazy(parameter) for parameter in model.parameters()):
        x = moved(val.inputs(slice(0, 2)), device)
        call_of(model, x)(model.eval(), x)
        model.train()


def _groups(objective: Objective, model: nn.Module, config: TrainConfig) -> Groups:
    """The objective's own parameter groups, or the usual ones.

    Where the objective thaws layers as epochs go, frozen parameters are in them too: without gradients they stay.
    """
    with users_code(f"{type(objective).__name__}.parameter_groups"):
        own = objective.parameter_groups(model, config)
        if own is not None:
            return checked_groups(model, config, own)
    if not overrides(objective, "on_epoch"):
        return parameter_groups(model, config)
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    model.requires_grad_(True)
    try:
        return parameter_groups(model, config)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _order(objective: Objective, config: TrainConfig, train: Dataset, seed: int) -> Order:
    sampler = objective.sampler(config, train)
    if not train.is_stream:
        return Order(len(train), config, seed, sampler)
    if sampler is not None:
        raise ObjectiveError("a stream comes in an order of its own: leave the sampler out")
    return Order(len(train), config, seed, SequentialSampler(range(len(train))))


def _trial_step(run: Run) -> None:
    """A forward and a backward pass, to see that they run; nothing of the run changes by it."""
    kept = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    batch = next(iter(run.feed.windows(0)))[0].get()
    run.model.train()
    try:
        run.stepping(run.model, batch, run.precision.autocast()).loss.backward()  # type: ignore[no-untyped-call]  # torch's
    finally:
        run.model.zero_grad(set_to_none=True)
        run.model.load_state_dict(kept)
