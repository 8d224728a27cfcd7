"""Building a run from an objective: everything that can be wrong is found here, before the first step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler

from objectives.errors import MetricError, ObjectiveError, nearest, users_code
from objectives.training.config import TrainConfig
from objectives.training.data.batches import build_feed
from objectives.training.data.dataset import Batch, Dataset, Splits
from objectives.training.data.samplers import Order
from objectives.training.data.tree import moved
from objectives.training.evaluation.across_ranks import over_ranks
from objectives.training.evaluation.calling import call_of
from objectives.training.evaluation.losses import CountedCrossEntropy, adds_up
from objectives.training.evaluation.metrics import (
    BINARY,
    CLASSIFICATION,
    DIRECTIONS,
    Metrics,
    as_metrics,
    fitting,
    largest_class,
    unfit,
)
from objectives.training.evaluation.step import LossStep, Stepping
from objectives.training.loop.fresh import Fresh, build_fresh
from objectives.training.loop.guards import FiniteGuard
from objectives.training.loop.performance import compiled, layout
from objectives.training.loop.prepared import prepared_splits
from objectives.training.loop.progress import Progress
from objectives.training.loop.run import FORMAT, Run
from objectives.training.loop.steplog import StepLog
from objectives.training.loop.stepping import as_module, build_stepping, call_in
from objectives.training.optimizers.averaging import build_average
from objectives.training.optimizers.optimizer import Groups, build_optimizer, checked_groups, parameter_groups
from objectives.training.optimizers.precision import Precision
from objectives.training.optimizers.sam import Sharpness
from objectives.training.optimizers.schedules import build_schedule, check_length
from objectives.training.ranks import ALONE, Ranks
from objectives.training.reproducibility.environment import environment, uncommitted
from objectives.training.reproducibility.seeds import set_seed
from objectives.training.strategies.choice import build_strategy

if TYPE_CHECKING:
    from objectives.objective import Objective

_UNEVEN = 0.75  # share of one class from which accuracy tells little
# What the peak rate is multiplied by on so many devices (Goyal et al. 2017; Krizhevsky 2014).
_SCALINGS: dict[str, Callable[[int], float]] = {"none": lambda _: 1.0, "linear": float, "sqrt": math.sqrt}
_TRIED = 32  # validation samples that a loss is tried on


def build(  # noqa: PLR0913 all that a run is made of, by keyword
    objective: Objective,
    config: TrainConfig,
    *,
    epochs: int,
    seed: int,
    split_seed: int,
    device: torch.device,
    division: int | None = None,
    refit: int | None = None,
    ranks: Ranks = ALONE,
) -> tuple[Run, dict[str, float]]:
    """The run, and what its untrained model scores.

    Every part of the objective's code has run once when this returns, so its mistakes show before training. With a
    `division` it is a run that confirms, with `refit` one on all but the test split: see `Trainer`.

    Raises:
        ObjectiveError: the objective's data, model, loss or metrics are wrong; the message has its file and line.
    """
    who = type(objective).__name__
    splits, split_hash = prepared_splits(objective, split_seed, division if refit is None else "all")
    _check_ranks(who, splits, split_hash, ranks)
    strategy = build_strategy(config, ranks)
    set_seed(seed, "init")
    with users_code(f"{who}.model"):
        model = as_module(objective.model(config, splits.train), "model").to(device)
    with users_code(f"{who}.model on the validation split"):
        _materialise(model, splits.val, device)
    stepping = build_stepping(objective, config, splits, model, device)
    _check_classes(objective, splits, stepping)
    metrics, fresh = _metrics(objective, splits, split_seed, division, device, ranks)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ObjectiveError(f"{who}.model has no parameters to train")
    with users_code(f"{who}.augment"):
        augment = objective.augment(config)
        if augment is not None:
            augment(splits.train.inputs(slice(0, 2)))
    in_memory = config.num_workers is None and splits.val.in_memory
    val = splits.val if fresh is None or fresh.rows is None else splits.val.take(fresh.rows)
    with users_code(f"{who}.sampler"):
        order = _order(objective, config, splits.train, seed)
    epoch_steps = order.steps
    _check_length(config, len(splits.train), epochs * epoch_steps, epoch_steps)
    maximize = objective.direction == "maximize"
    layout(model, config)
    ranks.copy_first(model.state_dict().values())  # a model may draw from what no seed reaches
    average, steplog = build_average(model, config, epochs), StepLog(model, config.log_every, strategy.norms)
    strategy.place(model, *average.models)
    groups = _groups(objective, model, config)
    for group in groups:
        group["lr"] *= _SCALINGS[config.lr_scaling](ranks.world)
    optimizer, sharpness = build_optimizer(model, config, device, groups), None
    if config.optimizer == "sam":
        sharpness = Sharpness(optimizer)
        optimizer = sharpness.base
    source = _source(objective)
    run = Run(
        identity={
            "format": FORMAT,
            "objective": objective.name,
            "config": config.to_dict(),
            "epochs": epochs,
            "seed": seed,
            "split_seed": split_seed,
            "split_hash": split_hash,
            **({} if division is None else {"division": division}),
            **({} if refit is None else {"refit": refit}),
        },
        environment=environment(device, source, ranks.world),
        changes=uncommitted(source.parent if source else Path.cwd()),
        config=config,
        epochs=epochs,
        seed=seed,
        device=device,
        splits=splits,
        val=val.to(device) if in_memory else val,
        feed=build_feed(splits.train, config, order, seed=seed, device=device, augment=augment, ranks=ranks),
        model=model,
        stepping=stepping,
        metrics=metrics,
        optimizer=optimizer,
        sharpness=sharpness,
        schedule=build_schedule(optimizer, config, epochs * epoch_steps, epoch_steps=epoch_steps, maximize=maximize),
        precision=Precision(config.precision, device),
        average=average,
        guard=FiniteGuard(device),
        steplog=steplog,
        progress=Progress(f"val_{objective.metric}", maximize=maximize, keep_last=refit is not None),
        ranks=ranks,
        strategy=strategy,
        fresh=fresh,
        refit=refit,
    )
    strategy.begin(model, stepping)
    with strategy.explained():
        scores = _rehearse(objective, run)
    if config.compile:
        why = compiled(run.model, run.judged, lambda: _trial_step(run))
        run.environment["compiled"] = why is None
        if why:
            run.notes.append(f"not compiled: {why}")
    return run, scores


def _metrics(
    objective: Objective, splits: Splits, split_seed: int, division: int | None, device: torch.device, ranks: Ranks
) -> tuple[Metrics, Fresh | None]:
    """What the validation split is judged by; of a run on a fresh division its halves, too."""
    who, fresh = type(objective).__name__, None
    with users_code(f"{who}.metrics"):
        metrics = as_metrics(objective.metrics(splits.train), objective.metric)
    if division is not None:
        fresh = build_fresh(
            objective, splits, metrics, split_seed=split_seed, division=division, device=device, ranks=ranks
        )
    with users_code(f"{who}.metrics"):
        metrics = over_ranks(metrics, ranks)
        if hasattr(metrics, "to"):
            metrics.to(device)
    return metrics, fresh


def oddities(run: Run) -> list[str]:
    """What is not wrong and yet not what was asked for, in a line each."""
    samples, size, found = len(run.splits.train), run.config.batch_size, []
    if size > samples:
        found.append(f"batch_size {size} is more than the {samples} training samples: a step takes all")
    if not _loss_adds_up(run):
        found.append(
            "the loss of a batch is not the mean over its samples: training depends on batch_size, and the validation "
            "loss on eval_batch_size"
        )
    if run.refit is not None and run.config.schedule == "plateau":
        found.append("the schedule plateau goes by validation samples that are trained on: the rate may fall later")
    norms = [m for m in run.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if not run.ranks.alone and not all(isinstance(norm, nn.SyncBatchNorm) for norm in norms):
        found.append(
            f"batch norm takes its statistics from each device's share of a batch: {run.ranks.world} devices train "
            "otherwise than one"
        )
    share = largest_class(run.splits.train)
    if run.progress.key == "val_accuracy" and share is not None and share >= _UNEVEN:
        found.append(
            f"{share:.0%} of the training samples are of one class, and so much accuracy costs nothing: "
            "judge by macro_f1, or by auroc beside average_precision"
        )
    return found


def _check_ranks(who: str, splits: Splits, split_hash: str, ranks: Ranks) -> None:
    """Refuses data that ranks cannot share.

    Raises:
        ObjectiveError: they are not the same on all, or fewer than the ranks.
    """
    hashes = ranks.each(split_hash)
    other = [rank for rank, found in enumerate(hashes) if found != hashes[0]]
    if other:
        raise ObjectiveError(f"{who}.data gives rank {other[0]} other data than rank 0: make it a function of the seed")
    if len(splits.val) < ranks.world:
        raise ObjectiveError(f"{who}.data: {len(splits.val)} validation samples are too few for {ranks.world} devices")


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
    if not objective.has_on_epoch:
        return parameter_groups(model, config)
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        return parameter_groups(model, config)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


@torch.inference_mode()
def _loss_adds_up(run: Run) -> bool:
    """Whether the loss of some validation samples is the mean of those of its parts."""
    if not isinstance(run.stepping, LossStep):
        return True  # such a step says itself what its loss is a mean over
    batch, output = _tried(run, _TRIED)
    return adds_up(run.stepping.loss, output, batch.y, batch.size)


def _tried(run: Run, samples: int) -> tuple[Batch, Any]:
    """Some validation samples, and what the model makes of them."""
    batch = run.val.batch(slice(0, samples))
    batch = Batch(moved(batch.x, run.device), moved(batch.y, run.device), batch.size)
    training = run.judged.training
    run.judged.eval()
    output = call_in(run.stepping)(run.judged, batch.x)
    run.judged.train(training)
    return batch, output


@torch.inference_mode()
def _check_pairs(loss: nn.Module, y: Tensor, output: Tensor) -> None:
    """Refuses a loss that compares [n, 1] with [n]: every output with every target.

    It is tried on outputs that equal the targets `y`: of an untrained model all might be far off by the same.
    """
    given, wanted = ["n", *output.shape[1:]], ["n", *y.shape[1:]]
    if given == wanted or output[0].numel() != y[0].numel():
        return
    some = y[:_TRIED].to(output.device)
    some = some[some.reshape(len(some), -1)[:, 0].argsort()]
    if not adds_up(loss, some.reshape(len(some), *output.shape[1:]).float(), some, len(some)):
        raise ObjectiveError(
            f"the loss compares every output with every target: outputs are {_dims(given)}, targets {_dims(wanted)}; "
            "give one the shape of the other, as by output.squeeze(1)"
        )


def _dims(shape: list[object]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _order(objective: Objective, config: TrainConfig, train: Dataset, seed: int) -> Order:
    sampler = objective.sampler(config, train)
    if not train.is_stream:
        return Order(len(train), config, seed, sampler)
    if sampler is not None:
        raise ObjectiveError("a stream comes in an order of its own: leave the sampler out")
    return Order(len(train), config, seed, SequentialSampler(range(len(train))))


def _check_length(config: TrainConfig, samples: int, total_steps: int, epoch_steps: int) -> None:
    batches = max(samples // config.batch_size if config.drop_last else -(-samples // config.batch_size), 1)
    if config.accumulate > batches:
        raise ObjectiveError(
            f"accumulate {config.accumulate} with batch_size {config.batch_size} is more than an epoch of {samples} "
            f"samples: set accumulate to at most {batches}"
        )
    check_length(config, total_steps=total_steps, epoch_steps=epoch_steps)


def _trial_step(run: Run) -> None:
    """A forward and a backward pass, to see that they run; nothing of the run changes by it."""
    kept = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    batch = next(iter(run.feed.windows(0)))[0].get()
    run.model.train()
    try:
        run.stepping(run.model, batch, run.precision.autocast()).loss.backward()  # type: ignore[no-untyped-call]
    finally:
        run.model.zero_grad(set_to_none=True)
        run.model.load_state_dict(kept)


def _source(objective: Objective) -> Path | None:
    try:
        source = inspect.getsourcefile(type(objective))
    except (TypeError, OSError):  # a class made in a console has none
        return None
    return Path(source).resolve() if source and Path(source).exists() else None


def _entropy(stepping: Stepping) -> nn.Module | None:
    """The cross entropy that the step is by, if it is by one: it takes labels for numbers of outputs."""
    loss = stepping.loss if isinstance(stepping, LossStep) else None
    return loss if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss, CountedCrossEntropy)) else None


def _ignored(loss: nn.Module | None) -> int | None:
    """The target that stands for none, to this loss."""
    plain = loss.loss if isinstance(loss, CountedCrossEntropy) else loss
    found = getattr(plain, "ignore_index", None)
    return found if isinstance(found, int) else None


def _check_classes(objective: Objective, splits: Splits, stepping: Stepping) -> None:
    """Looks at labels where they are taken for numbers of classes."""
    loss, y = _entropy(stepping), splits.train.y
    judged = objective.uses_builtin_metrics and objective.metric in (*CLASSIFICATION, *BINARY)
    if not isinstance(y, Tensor) or y.dtype.is_floating_point or not (loss or judged):
        return
    ignored = _ignored(loss)
    with users_code(f"{type(objective).__name__}.data"):
        splits.check_classes(ignored)


def _rehearse(objective: Objective, run: Run) -> dict[str, float]:
    """One evaluation before training: shapes, labels and the metric's name are checked by using them."""
    who, metric = type(objective).__name__, objective.metric
    better = DIRECTIONS.get(metric, objective.direction)
    if objective.direction != better:
        raise ObjectiveError(f"{who}: {metric} is to {better}, so set direction = {better!r}")
    with users_code(f"{who} on the validation split"):
        if isinstance(run.stepping, LossStep):
            _check_outputs(objective, run, run.stepping.loss)
        scores = run.validate()
    if metric not in scores:
        raise MetricError(metric, f"is none that {who} gives: {nearest(metric, list(scores))}")
    return scores


@torch.inference_mode()
def _check_outputs(objective: Objective, run: Run, loss: nn.Module) -> None:
    """Looks at what the model gives for two samples.

    Cross entropy with a label above the number of outputs is an out-of-bounds read on a GPU: look first.
    """
    batch, output = _tried(run, 2)
    y, metric = run.splits.train.y, objective.metric
    if not isinstance(output, Tensor):
        if objective.uses_builtin_metrics and metric != "loss":
            raise ObjectiveError(
                f"the model returns a {type(output).__name__}, and {metric} takes one tensor: override metrics(), or "
                "return a Step with outputs= from step()"
            )
        return
    if len(output) != batch.size and isinstance(batch.y, Tensor) and len(batch.y) == batch.size:
        raise ObjectiveError(f"the model gives {list(output.shape)} for {batch.size} inputs: keep the first dim")
    known = y if isinstance(y, Tensor) else batch.y
    if not isinstance(known, Tensor):
        return
    entropy = _entropy(run.stepping)
    labels = known if (ignored := _ignored(entropy)) is None else known[known != ignored]
    classes = entropy is not None and not known.dtype.is_floating_point and labels.numel() > 0
    if classes and (output.ndim < 2 or output.shape[1] <= int(labels.max())):
        raise ObjectiveError(
            f"the model gives {list(output.shape[1:])} outputs a sample, but labels go up to {int(labels.max())}: "
            "one that stands for none is the loss's ignore_index"
        )
    if objective.uses_builtin_metrics and metric not in ("loss", *fitting(known, output)):
        raise unfit(metric, known, output)
    _check_pairs(loss, known, output)
