"""Check data, labels, outputs, loss and metrics before the first step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hpsearch.objectives.errors import MetricError, ObjectiveError, suggest_names, wrap_user_errors
from hpsearch.objectives.objective import Objective, overrides
from hpsearch.objectives.training.config import TrainConfig
from hpsearch.objectives.training.data.dataset import Batch
from hpsearch.objectives.training.data.splits import Splits
from hpsearch.objectives.training.evaluation.evaluate import evaluation_mode
from hpsearch.objectives.training.evaluation.losses import CountedCrossEntropy, is_additive_loss
from hpsearch.objectives.training.evaluation.metrics import (
    BINARY,
    CLASSIFICATION,
    DIRECTIONS,
    compute_majority_share,
    list_compatible_metrics,
    make_incompatible_metric_error,
)
from hpsearch.objectives.training.evaluation.step import LossStep, StepFunction
from hpsearch.objectives.training.loop.run import Run
from hpsearch.objectives.training.loop.step_functions import get_forward_call
from hpsearch.objectives.training.optimizers.schedules import check_length
from hpsearch.objectives.training.ranks import Ranks

_IMBALANCED_SHARE = 0.75  # share of one class from which accuracy is misleading
_LOSS_SAMPLES = 32  # number of validation samples that test the loss


def check_ranks(owner: str, splits: Splits, split_hash: str, ranks: Ranks) -> None:
    """Reject data that the ranks cannot share.

    Raises:
        ObjectiveError: the ranks have different data, or there are fewer validation samples than ranks.
    """
    hashes = ranks.all_gather_object(split_hash)
    if other := [rank for rank, found in enumerate(hashes) if found != hashes[0]]:
        raise ObjectiveError(f"{owner}.data differs between ranks 0 and {other[0]}; it must depend only on the seed")
    if len(splits.val) < ranks.world_size:
        raise ObjectiveError(
            f"{owner}.data: {len(splits.val)} validation samples are too few for {ranks.world_size} devices"
        )


def check_epoch(config: TrainConfig, samples: int, total_steps: int, epoch_steps: int) -> None:
    """Reject a gradient accumulation that is longer than an epoch, or a schedule that is longer than the run.

    Raises:
        ObjectiveError: a setting is too large; the message has the setting and a valid value.
    """
    batches = max(samples // config.batch_size if config.drop_last else -(-samples // config.batch_size), 1)
    if config.gradient_accumulation_steps > batches:
        raise ObjectiveError(
            f"gradient_accumulation_steps {config.gradient_accumulation_steps} with batch_size {config.batch_size} is "
            f"more than an epoch of {samples} samples; set gradient_accumulation_steps to at most {batches}"
        )
    check_length(config, total_steps=total_steps, epoch_steps=epoch_steps)


def check_classes(objective: Objective, splits: Splits, step_function: StepFunction) -> None:
    """Check labels that the loss or the metrics use as class indices."""
    loss, y = _find_cross_entropy(step_function), splits.train.y
    metrics_use_labels = not overrides(objective, "metrics") and objective.metric in (*CLASSIFICATION, *BINARY)
    if not isinstance(y, Tensor) or y.dtype.is_floating_point or not (loss or metrics_use_labels):
        return
    ignored = _get_ignore_index(loss)
    with wrap_user_errors(f"{type(objective).__name__}.data"):
        splits.check_classes(ignored)


def sanity_check(objective: Objective, run: Run) -> dict[str, float]:
    """Evaluate once before training, to check shapes, labels and metric names; return the scores.

    Raises:
        ObjectiveError: a check fails.
        MetricError: the objective does not report a required metric.
    """
    owner, metric = type(objective).__name__, objective.metric
    better = DIRECTIONS.get(metric, objective.direction)
    if objective.direction != better:
        raise ObjectiveError(f"{owner}: direction {objective.direction!r} is wrong for {metric!r}; use {better!r}")
    with wrap_user_errors(f"{owner} on the validation split"):
        if isinstance(run.step_function, LossStep):
            _check_outputs(objective, run, run.step_function.loss)
        scores = run.validate()
    if metric not in scores:
        hint = suggest_names(metric, list(scores))
        if overrides(objective, "step"):
            hint += "; or let step() return outputs and targets"
        raise MetricError(metric, f"is not a metric of {owner}; {hint}")
    run.measurer.sanity_check(run.eval_model, scores)
    return scores


def list_config_warnings(run: Run) -> list[str]:
    """Return warnings about valid but probably unintended settings, one line each."""
    samples, size, found = len(run.splits.train), run.config.batch_size, []
    if size > samples:
        found.append(f"batch_size {size} exceeds the {samples} training samples; each step uses all of them")
    if not _loss_adds_up(run):
        found.append(
            "the loss of a batch is not the mean over its samples: training depends on batch_size, and the validation "
            "loss on eval_batch_size"
        )
    if run.plan.refit is not None and run.config.schedule == "plateau":
        found.append("schedule='plateau' uses validation samples, but a refit trains on them; lr may decay later")
    norms = [m for m in run.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if not run.ranks.is_single_process and not all(isinstance(norm, nn.SyncBatchNorm) for norm in norms):
        found.append(f"batch norm uses samples of one device; results on {run.ranks.world_size} devices and one differ")
    share = compute_majority_share(run.splits.train)
    if run.curve.metric_key == "val_accuracy" and share is not None and share >= _IMBALANCED_SHARE:
        found.append(
            f"{share:.0%} of the training samples have one class, and a constant prediction reaches this accuracy; "
            "use macro_f1, or auroc with average_precision"
        )
    return found


@torch.no_grad()
def _check_outputs(objective: Objective, run: Run, loss: nn.Module) -> None:
    """Check the model's outputs for two samples.

    On a GPU, cross entropy reads out of bounds for labels above the number of outputs, so this check comes first.
    """
    batch, output = _evaluate_samples(run, 2)
    y, metric = run.splits.train.y, objective.metric
    is_built_in = metric in DIRECTIONS and not overrides(objective, "metrics")
    if not isinstance(output, Tensor):
        if is_built_in and metric != "loss":
            raise ObjectiveError(
                f"the model returns a {type(output).__name__}, but {metric} needs a tensor; override metrics(), or "
                "return a Step with outputs= from step()"
            )
        return
    if len(output) != batch.size and isinstance(batch.y, Tensor) and len(batch.y) == batch.size:
        raise ObjectiveError(f"the model returns {list(output.shape)} for {batch.size} inputs; dim 0 must be the batch")
    known = y if isinstance(y, Tensor) else batch.y
    if not isinstance(known, Tensor):
        return
    entropy = _find_cross_entropy(run.step_function)
    labels = known if (ignored := _get_ignore_index(entropy)) is None else known[known != ignored]
    classes = entropy is not None and not known.dtype.is_floating_point and labels.numel() > 0
    if classes and (output.ndim < 2 or output.shape[1] <= int(labels.max())):
        raise ObjectiveError(
            f"the model returns {list(output.shape[1:])} outputs per sample, but labels go up to {int(labels.max())}; "
            "add outputs, or set ignore_index of the loss to the label without a class"
        )
    if is_built_in and metric not in ("loss", *list_compatible_metrics(known, output)):
        raise make_incompatible_metric_error(metric, known, output)
    _check_pairs(loss, known, output)


@torch.inference_mode()
def _check_pairs(loss: nn.Module, y: Tensor, output: Tensor) -> None:
    """Reject a loss that broadcasts [n, 1] against [n] and so compares every output with every target.

    The test uses outputs equal to the targets `y`, because an untrained model may be equally wrong on all samples.
    """
    given, wanted = ["n", *output.shape[1:]], ["n", *y.shape[1:]]
    if given == wanted or output[0].numel() != y[0].numel():
        return
    some = y[:_LOSS_SAMPLES].to(output.device)
    some = some[some.reshape(len(some), -1)[:, 0].argsort()]
    if not is_additive_loss(loss, some.reshape(len(some), *output.shape[1:]).float(), some, len(some)):
        raise ObjectiveError(
            f"the loss compares every output with every target: outputs are {_dims(given)}, targets {_dims(wanted)}; "
            "reshape one of them, for example by output.squeeze(1)"
        )


@torch.no_grad()
def _loss_adds_up(run: Run) -> bool:
    """Return whether the loss of some validation samples is the mean of the losses of the single samples."""
    if not isinstance(run.step_function, LossStep):
        return True  # a custom step declares its own normalizer
    batch, output = _evaluate_samples(run, _LOSS_SAMPLES)
    return is_additive_loss(run.step_function.loss, output, batch.y, batch.size)


def _evaluate_samples(run: Run, samples: int) -> tuple[Batch, Any]:
    """Return some validation samples and the model's outputs for them."""
    batch = run.val.batch(slice(0, samples)).to(run.device)
    with evaluation_mode(run.eval_model, run.device, "rehearsal"):
        return batch, get_forward_call(run.step_function)(run.eval_model, batch.x)


def _dims(shape: list[object]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _find_cross_entropy(step_function: StepFunction) -> nn.Module | None:
    """Return the cross-entropy loss of the step, which uses labels as class indices; None for other losses."""
    loss = step_function.loss if isinstance(step_function, LossStep) else None
    return loss if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss, CountedCrossEntropy)) else None


def _get_ignore_index(loss: nn.Module | None) -> int | None:
    """Return the `ignore_index` of a loss; None if the loss has none."""
    found = getattr(loss.loss if isinstance(loss, CountedCrossEntropy) else loss, "ignore_index", None)
    return found if isinstance(found, int) else None
