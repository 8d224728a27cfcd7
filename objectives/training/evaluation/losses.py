"""Losses: the default loss for a metric, and mean losses whose divisor is known, so that they can be combined."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.data.tree import describe_shapes, index_rows, map_tensors, tensors
from hpsearch.objectives.training.evaluation.metrics import (
    BINARY,
    CLASSIFICATION,
    REGRESSION,
    make_incompatible_metric_error,
)

_TOLERANCE = 1e-4  # tolerance when means of fp32 losses are compared


def build_default_loss(metric: str, y: Any, *, label_smoothing: float = 0.0) -> nn.Module:
    """Return the default loss for a metric: squared error, binary cross entropy, or cross entropy.

    `y` are the training targets [n, ...]; None if they are not known in advance.

    Raises:
        MetricError: the built-in metric is incompatible with the targets.
        ObjectiveError: the metric has no default loss for these targets, or label smoothing is set but the targets are
            not classes.
    """
    numbers = isinstance(y, Tensor) and y.dtype.is_floating_point
    if y is not None and not isinstance(y, Tensor):
        raise ObjectiveError(f"there is no default loss for targets {describe_shapes(y)}; override loss()")
    if metric in REGRESSION or (metric == "loss" and numbers):
        if label_smoothing:
            raise ObjectiveError(
                f"label_smoothing={label_smoothing:g} needs class labels, but the default loss for {metric} is the "
                "squared error; set label_smoothing=0"
            )
        return SquaredError()
    if metric in BINARY:
        return BinaryLogits(label_smoothing)
    if not numbers:
        return nn.CrossEntropyLoss(label_smoothing=label_smoothing)
    if metric in CLASSIFICATION and isinstance(y, Tensor):
        raise make_incompatible_metric_error(metric, y)
    raise ObjectiveError(f"metric {metric!r} has no default loss for targets that are not classes; override loss()")


class SquaredError(nn.Module):
    """Squared error per sample [n]. Outputs and targets need equal numbers of values: [n] matches [n, 1]."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean squared error over the values of each sample [n]."""
        if output.numel() != target.numel():
            raise ObjectiveError(f"outputs {list(output.shape)} do not match targets {list(target.shape)}")
        count = len(target)
        return (output.reshape(count, -1) - target.reshape(count, -1)).square().mean(dim=1)


class BinaryLogits(nn.Module):
    """Cross entropy per sample [n] of labels 0 or 1 [n], from one or two logits per sample.

    `pos_weight` multiplies the loss of positives.
    """

    pos_weight: Tensor | None

    def __init__(self, label_smoothing: float = 0.0, pos_weight: Tensor | None = None) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing
        self.register_buffer("pos_weight", pos_weight)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the cross entropy of each sample [n]; `label_smoothing` moves labels towards one half."""
        count = len(target)
        logits, labels = output.reshape(count, -1), target.reshape(count, -1)
        if labels.shape[1] != 1 or logits.shape[1] not in {1, 2}:
            raise ObjectiveError(
                f"outputs {list(output.shape)} do not fit targets {list(target.shape)}; return 1 or 2 logits per sample"
            )
        score = logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]
        soft = labels[:, 0].to(score.dtype) * (1 - self.label_smoothing) + self.label_smoothing / 2
        return functional.binary_cross_entropy_with_logits(score, soft, pos_weight=self.pos_weight, reduction="none")


class CountedCrossEntropy(nn.Module):
    """PyTorch's mean cross entropy with class weights or ignored targets.

    The divisor of the mean is the total weight of the targets. `weigh` returns it, so that means of batches can be
    combined. The loss is 0 instead of NaN if all targets are ignored.
    """

    def __init__(self, loss: nn.CrossEntropyLoss | nn.NLLLoss) -> None:
        super().__init__()
        self.loss = copy.copy(loss)
        self.loss.reduction = "sum"

    def weigh(self, target: Tensor) -> Tensor:
        """Return the divisor of the mean over `target`, a scalar on the device of `target`."""
        counts = target != self.loss.ignore_index
        if self.loss.weight is None:
            return counts.sum()
        return (self.loss.weight[torch.where(counts, target, 0)] * counts).sum()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross entropy, a scalar."""
        value: Tensor = self.loss(output, target)
        return value / self.weigh(target).clamp_min(torch.finfo(value.dtype).tiny)


def as_additive_loss(loss: nn.Module, *targets: Any) -> nn.Module:
    """Return the loss in a form whose batch means can be combined to the mean over all samples.

    `targets` are the targets of the splits to evaluate; a target is None if it is not known.

    Raises:
        ObjectiveError: the loss has `reduction="sum"`.
    """
    if getattr(loss, "reduction", "none") == "sum":
        raise ObjectiveError(f"{type(loss).__name__} must not use reduction='sum'; use 'none' or 'mean'")
    if not isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) or loss.reduction != "mean":
        return loss
    if type(loss).forward not in {nn.CrossEntropyLoss.forward, nn.NLLLoss.forward}:  # its mean may be another one
        return loss
    known = [y for y in targets if isinstance(y, Tensor)]
    if any(y.dtype.is_floating_point for y in known):  # class probabilities: PyTorch divides by the batch size
        return loss
    ignored = len(known) < len(targets) or any(bool((y == loss.ignore_index).any()) for y in known)
    return CountedCrossEntropy(loss) if loss.weight is not None or ignored else loss


def compute_loss_weight(loss: nn.Module, target: Any) -> Tensor | int:
    """Return the divisor of a batch's mean loss: the result of `loss.weigh(target)` if defined, else the batch size."""
    own = getattr(loss, "weigh", None)
    return len(next(tensors(target))[1]) if own is None else own(target)


def compute_mean_loss(loss: nn.Module, output: Any, target: Any, size: int) -> Tensor:
    """Return the mean loss of a batch of `size` samples, in fp32.

    Raises:
        ObjectiveError: the loss is not a tensor, or neither a scalar nor one value per sample.
    """
    value = loss(_to_fp32(output), target)
    if not isinstance(value, Tensor):
        raise ObjectiveError(f"the loss must be a tensor, not {type(value).__name__}")
    value = value.float()
    if value.ndim == 0:
        return value
    if value.shape[0] != size or (value.ndim > 1 and value.shape not in _shapes(output, target)):
        raise ObjectiveError(
            f"the loss has shape {list(value.shape)} for outputs {_describe_shape(output)} and targets "
            f"{_describe_shape(target)}; return one value per sample [n], or the mean"
        )
    return value.mean()


def _shapes(*trees: Any) -> list[torch.Size]:
    return [tensor.shape for tree in trees for _, tensor in tensors(tree)]


def _to_fp32(output: Any) -> Any:
    """Convert floating-point outputs to fp32."""
    if isinstance(output, Tensor):
        return output if output.is_complex() else output.float()
    return map_tensors(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor, output)


def _describe_shape(tree: Any) -> str:
    return str(list(tree.shape)) if isinstance(tree, Tensor) else f"{{{', '.join(name for name, _ in tensors(tree))}}}"


def is_additive_loss(loss: nn.Module, output: Any, target: Any, size: int) -> bool:
    """Return whether the loss of a batch of `size` samples is the weighted mean of the losses of its parts.

    The result is also True for losses that cannot be checked: random losses, and losses whose outputs or targets do not
    have one row per sample.
    """
    whole, again = (float(compute_mean_loss(loss, output, target, size)) for _ in range(2))
    cut = size // 3
    rows = {len(tensor) for tree in (output, target) for _, tensor in tensors(tree) if tensor.ndim}
    if whole != again or not cut or rows != {size}:
        return True
    total = weight = 0.0
    for part in (slice(0, cut), slice(cut, size)):
        outputs, targets = index_rows(output, part), index_rows(target, part)
        share = float(compute_loss_weight(loss, targets))
        total += share * float(compute_mean_loss(loss, outputs, targets, part.stop - part.start)) if share else 0.0
        weight += share
    return math.isclose(whole, total / (weight or 1.0), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
