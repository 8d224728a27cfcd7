"""What is looked at before the first step: data, labels, outputs, loss and metrics, by using them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hpsearch.objectives.errors import MetricError, ObjectiveError, nearest, users_code
from hpsearch.objectives.objective import Objective, overrides
from hpsearch.objectives.training.config import TrainConfig
from hpsearch.objectives.training.data.dataset import Batch
from hpsearch.objectives.training.data.splits import Splits
from hpsearch.objectives.training.evaluation.evaluate import evaluating
from hpsearch.objectives.training.evaluation.losses import CountedCrossEntropy, adds_up
from hpsearch.objectives.training.evaluation.metrics import (
    BINARY,
    CLASSIFICATION,
    DIRECTIONS,
    fitting,
    largest_class,
    unfit,
)
from hpsearch.objectives.training.evaluation.step import LossStep, Stepping
from hpsearch.objectives.training.loop.run import Run
from hpsearch.objectives.training.loop.stepping import call_in
from hpsearch.objectives.training.optimizers.schedules import check_length
from hpsearch.objectives.training.ranks import Ranks

_UNEVEN = 0.75  # share of one class from which accuracy tells little
_TRIED = 32  # validation samples that a loss is tried on


def check_ranks(who: str, splits: Splits, split_hash: str, ranks: Ranks) -> None:
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


def check_epoch(config: TrainConfig, samples: int, total_steps: int, epoch_steps: int) -> None:
    """Refuses steps and schedules that do not fit into the epochs.

    Raises:
        ObjectiveError: it says which setting, and what would do.
    """
    batches = max(samples // config.batch_size if config.drop_last else -(-samples // config.batch_size), 1)
    if config.accumulate > batches:
        raise ObjectiveError(
            f"accumulate {config.accumulate} with batch_size {config.batch_size} is more than an epoch of {samples} "
            f"samples: set accumulate to at most {batches}"
        )
    check_length(config, total_steps=total_steps, epoch_steps=epoch_steps)


def check_classes(objective: Objective, splits: Splits, stepping: Stepping) -> None:
    """Looks at labels where they are taken for numbers of classes."""
    loss, y = _entropy(stepping), splits.train.y
    judged = not overrides(objective, "metrics") and objective.metric in (*CLASSIFICATION, *BINARY)
    if not isinstance(y, Tensor) or y.dtype.is_floating_point or not (loss or judged):
        return
    ignored = _ignored(loss)
    with users_code(f"{type(objective).__name__}.data"):
        splits.check_classes(ignored)


def rehearse(objective: Objective, run: Run) -> dict[str, float]:
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
    run.measuring.rehearse(run.judged, scores)
    return scores


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
    if run.plan.refit is not None and run.config.schedule == "plateau":
        found.append("the schedule plateau goes by validation samples that are trained on: the rate may fall later")
    norms = [m for m in run.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if not run.ranks.alone and not all(isinstance(norm, nn.SyncBatchNorm) for norm in norms):
        found.append(
            f"batch norm takes its statistics from each device's share of a batch: {run.ranks.world} devices train "
            "otherwise than one"
        )
    share = largest_class(run.splits.train)
    if run.curve.key == "val_accuracy" and share is not None and share >= _UNEVEN:
        found.append(
            f"{share:.0%} of the training samples are of one class, and so much accuracy costs nothing: "
            "judge by macro_f1, or by auroc beside average_precision"
        )
    return found


@torch.inference_mode()
def _check_outputs(objective: Objective, run: Run, loss: nn.Module) -> None:
    """Looks at what the model gives for two samples.

    Cross entropy with a label above the number of outputs is an out-of-bounds read on a GPU: look first.
    """
    batch, output = _tried(run, 2)
    y, metric = run.splits.train.y, objective.metric
    if not isinstance(output, Tensor):
        if not overrides(objective, "metrics") and metric != "loss":
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
    if not overrides(objective, "metrics") and metric not in ("loss", *fitting(known, output)):
        raise unfit(metric, known, output)
    _check_pairs(loss, known, output)


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


@torch.inference_mode()
def _loss_adds_up(run: Run) -> bool:
    """Whether the loss of some validation samples is the mean of those of its parts."""
    if not isinstance(run.stepping, LossStep):
        return True  # such a step says itself what its loss is a mean over
    batch, output = _tried(run, _TRIED)
    return adds_up(run.stepping.loss, output, batch.y, batch.size)


def _tried(run: Run, samples: int) -> tuple[Batch, Any]:
    """Some validation samples, and what the model makes of them."""
    batch = run.val.batch(slice(0, samples)).to(run.device)
    with evaluating(run.judged, run.device, "rehearsal"):
        return batch, call_in(run.stepping)(run.judged, batch.x)


def _dims(shape: list[object]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _entropy(stepping: Stepping) -> nn.Module | None:
    """The cross entropy that the step is by, if it is by one: it takes labels for numbers of outputs."""
    loss = stepping.loss if isinstance(stepping, LossStep) else None
    return loss if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss, CountedCrossEntropy)) else None


def _ignored(loss: nn.Module | None) -> int | None:
    """The target that stands for none, to this loss."""
    plain = loss.loss if isinstance(loss, CountedCrossEntropy) else loss
    found = getattr(plain, "ignore_index", None)
    return found if isinstance(found, int) else None
