"""Building a run from an objective: everything that can be wrong is found here, before the first step."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from objectives.errors import ObjectiveError, nearest, users_code
from objectives.training.config import TrainConfig
from objectives.training.data import Splits, steps_per_epoch
from objectives.training.ema import averaged
from objectives.training.environment import environment
from objectives.training.evaluate import check_loss
from objectives.training.guards import FiniteGuard
from objectives.training.metrics import DIRECTIONS
from objectives.training.optim import build_optimizer
from objectives.training.precision import Precision
from objectives.training.progress import Progress
from objectives.training.reproducibility import set_seed
from objectives.training.run import FORMAT, Run
from objectives.training.schedules import build_schedule

if TYPE_CHECKING:
    from objectives.objective import Objective


def build(
    objective: Objective, config: TrainConfig, *, epochs: int, seed: int, split_seed: int, device: torch.device
) -> tuple[Run, dict[str, float]]:
    """The run, and what its untrained model scores.

    Every part of the objective's code has run once when this returns, so its mistakes show before training.

    Raises:
        ObjectiveError: the objective's data, model, loss or metrics are wrong; the message has its file and line.
    """
    who = type(objective).__name__
    splits = _splits(objective, split_seed)
    set_seed(seed, "init")
    with users_code(f"{who}.model"):
        model = _module(objective.model(config, splits.train), "model").to(device)
    with users_code(f"{who}.loss"):
        loss = _module(objective.loss(config, splits.train), "loss").to(device)
        check_loss(loss)
    with users_code(f"{who}.metrics"):
        metrics = objective.metrics(splits.train)
        metrics.to(device)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ObjectiveError(f"{who}.model has no parameters to train")
    train, val = splits.train.to(device), splits.val.to(device)
    steps = epochs * steps_per_epoch(
        len(train), batch_size=config.batch_size, accumulate=config.accumulate, drop_last=config.drop_last
    )
    optimizer = build_optimizer(model, config, device)
    run = Run(
        identity={
            "format": FORMAT,
            "objective": objective.name,
            "config": config.to_dict(),
            "epochs": epochs,
            "seed": seed,
            "split_seed": split_seed,
            "split_hash": splits.hash(),
        },
        environment=environment(device, _source(objective)),
        config=config,
        epochs=epochs,
        seed=seed,
        device=device,
        splits=splits,
        train=train,
        val=val,
        model=model,
        loss=loss,
        metrics=metrics,
        optimizer=optimizer,
        schedule=build_schedule(optimizer, config, steps),
        precision=Precision(config.precision, device),
        ema=None if config.ema_decay is None else averaged(model, config.ema_decay),
        guard=FiniteGuard(device),
        progress=Progress(f"val_{objective.metric}", maximize=objective.direction == "maximize"),
    )
    return run, _rehearse(objective, run)


def _splits(objective: Objective, split_seed: int) -> Splits:
    who = type(objective).__name__
    set_seed(split_seed, "data")  # so that data() is a function of the seed even where it uses a global generator
    with users_code(f"{who}.data"):
        splits = objective.data(split_seed)
    if not isinstance(splits, Splits):
        raise ObjectiveError(f"{who}.data must return Splits, not {type(splits).__name__}")
    try:
        splits.check()
    except ObjectiveError as error:
        raise ObjectiveError(f"{who}.data: {error}") from error
    return splits


def _source(objective: Objective) -> Path | None:
    try:
        source = inspect.getsourcefile(type(objective))
    except (TypeError, OSError):  # a class made in a console has none
        return None
    return Path(source).resolve() if source and Path(source).exists() else None


def _module(value: object, what: str) -> nn.Module:
    if not isinstance(value, nn.Module):
        raise ObjectiveError(f"{what}() must return a torch.nn.Module, not {type(value).__name__}")
    return value


def _rehearse(objective: Objective, run: Run) -> dict[str, float]:
    """One evaluation before training: shapes, labels and the metric's name are checked by using them."""
    who, metric = type(objective).__name__, objective.metric
    better = DIRECTIONS.get(metric, objective.direction)
    if objective.direction != better:
        raise ObjectiveError(f"{who}: {metric} is to {better}, so set direction = {better!r}")
    with users_code(f"{who} on the validation split"):
        _check_width(run)
        scores = run.validate()
    if metric not in scores:
        raise ObjectiveError(
            f"{who}.metric is {metric!r}, which metrics() does not give: {nearest(metric, list(scores))}"
        )
    return scores


@torch.inference_mode()
def _check_width(run: Run) -> None:
    """Cross entropy with a label above the number of outputs is an out-of-bounds read on a GPU: look first."""
    labels, training = run.splits.train.y, run.judged.training
    run.judged.eval()
    output = run.judged(run.val.x[:2])
    run.judged.train(training)
    if not isinstance(output, Tensor):
        raise ObjectiveError(f"the model must return one tensor, not {type(output).__name__}")
    if len(output) != len(run.val.x[:2]):
        raise ObjectiveError(
            f"the model gives {list(output.shape)} for {len(run.val.x[:2])} inputs: keep the first dim"
        )
    classes = not labels.dtype.is_floating_point and labels.ndim == 1 and isinstance(run.loss, nn.CrossEntropyLoss)
    if classes and (output.ndim < 2 or output.shape[1] <= int(labels.max())):
        raise ObjectiveError(
            f"the model gives {list(output.shape[1:])} outputs a sample, but labels go up to {int(labels.max())}"
        )
