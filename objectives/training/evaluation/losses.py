"""Losses: the usual one of a metric, and the mean of a batch with what it is a mean over."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.data.tree import form, map_tensors, taken, tensors
from hpsearch.objectives.training.evaluation.metrics import BINARY, CLASSIFICATION, REGRESSION, unfit

_ROUNDING = 1e-4  # of a mean of fp32 losses, and more than enough


def usual_loss(metric: str, y: Any, *, label_smoothing: float = 0.0) -> nn.Module:
    """Return the usual loss for a metric: squared error, binary cross entropy, or cross entropy.

    `y` are the training targets [n, ...], None where they are not known beforehand.

    Raises:
        MetricError: a built-in metric that does not fit the targets.
        ObjectiveError: no loss is usual for the metric and such targets, or the loss has no labels to smooth.
    """
    numbers = isinstance(y, Tensor) and y.dtype.is_floating_point
    if y is not None and not isinstance(y, Tensor):
        raise ObjectiveError(f"no loss is usual for targets {form(y)}: override loss()")
    if metric in REGRESSION or (metric == "loss" and numbers):
        if label_smoothing:
            raise ObjectiveError(
                f"label_smoothing {label_smoothing:g} needs classes: the usual loss for {metric} is the squared error"
            )
        return SquaredError()
    if metric in BINARY:
        return BinaryLogits(label_smoothing)
    if not numbers:
        return nn.CrossEntropyLoss(label_smoothing=label_smoothing)
    if metric in CLASSIFICATION and isinstance(y, Tensor):
        raise unfit(metric, y)
    raise ObjectiveError(f"no loss is usual for metric {metric!r} and targets that are not classes: override loss()")


class SquaredError(nn.Module):
    """Squared error per sample [n], from outputs and targets of as many values: [n] goes with [n, 1]."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean over the values of each sample."""
        if output.numel() != target.numel():
            raise ObjectiveError(f"outputs {list(output.shape)} do not match targets {list(target.shape)}")
        count = len(target)
        return (output.reshape(count, -1) - target.reshape(count, -1)).square().mean(dim=1)


class BinaryLogits(nn.Module):
    """Cross entropy per sample [n] of labels 0 or 1 [n], from one logit a sample, or from two.

    `pos_weight` multiplies the loss of positives.
    """

    pos_weight: Tensor | None

    def __init__(self, label_smoothing: float = 0.0, pos_weight: Tensor | None = None) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing
        self.register_buffer("pos_weight", pos_weight)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Labels are moved towards one half by `label_smoothing`."""
        count = len(target)
        logits, labels = output.reshape(count, -1), target.reshape(count, -1)
        if labels.shape[1] != 1 or logits.shape[1] not in {1, 2}:
            raise ObjectiveError(
                f"outputs {list(output.shape)} for targets {list(target.shape)}: "
                "two classes take one logit a sample, or two"
            )
        score = logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]
        soft = labels[:, 0].to(score.dtype) * (1 - self.label_smoothing) + self.label_smoothing / 2
        return functional.binary_cross_entropy_with_logits(score, soft, pos_weight=self.pos_weight, reduction="none")


class CountedCrossEntropy(nn.Module):
    """Torch's mean of a cross entropy over targets that count unevenly: some are ignored, or classes have weights.

    Such a mean is divided by the weight of the batch and not by its samples: `weigh` tells it, so that batches add up.
    Without any target that counts it is 0, and not NaN.
    """

    def __init__(self, loss: nn.CrossEntropyLoss | nn.NLLLoss) -> None:
        super().__init__()
        self.loss = copy.copy(loss)
        self.loss.reduction = "sum"

    def weigh(self, target: Tensor) -> Tensor:
        """What the mean over these targets is divided by, a scalar on their device."""
        counts = target != self.loss.ignore_index
        if self.loss.weight is None:
            return counts.sum()
        return (self.loss.weight[torch.where(counts, target, 0)] * counts).sum()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean, a scalar."""
        value: Tensor = self.loss(output, target)
        return value / self.weigh(target).clamp_min(torch.finfo(value.dtype).tiny)


def adding_up(loss: nn.Module, *targets: Any) -> nn.Module:
    """Return the loss in a form whose batches add up.

    `targets` are those of the splits that it evaluates, None where they are not known.

    Raises:
        ObjectiveError: `reduction="sum"`, which is no mean.
    """
    if getattr(loss, "reduction", "none") == "sum":
        raise ObjectiveError(f"{type(loss).__name__} must not use reduction='sum': use 'none' or 'mean'")
    if not isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) or loss.reduction != "mean":
        return loss
    known = [y for y in targets if isinstance(y, Tensor)]
    if any(y.dtype.is_floating_point for y in known):  # shares of classes: torch divides by the samples
        return loss
    ignored = len(known) < len(targets) or any(bool((y == loss.ignore_index).any()) for y in known)
    uneven = loss.weight is not None or ignored
    return CountedCrossEntropy(loss) if uneven else loss


def weigh(loss: nn.Module, target: Any) -> Tensor | int:
    """What the mean loss of a batch is a mean over: its samples, unless the loss has a method `weigh(target)`."""
    own = getattr(loss, "weigh", None)
    return len(next(tensors(target))[1]) if own is None else own(target)


def mean(loss: nn.Module, output: Any, target: Any, size: int) -> Tensor:
    """The mean of the losses of a batch of `size` samples, in fp32."""
    value: Tensor = loss(_full(output), target).float()
    if value.ndim == 0:
        return value
    if value.shape[0] != size or (value.ndim > 1 and value.shape not in _shapes(output, target)):
        raise ObjectiveError(
            f"the loss gave {list(value.shape)} for outputs {_shape(output)} and targets {_shape(target)}: "
            "give one value a sample [n], or the mean"
        )
    return value.mean()


def _shapes(*trees: Any) -> list[torch.Size]:
    return [tensor.shape for tree in trees for _, tensor in tensors(tree)]


def _full(output: Any) -> Any:
    """Outputs in fp32, whole numbers as they are."""
    if isinstance(output, Tensor):
        return output.float()
    return map_tensors(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor, output)


def _shape(tree: Any) -> str:
    return str(list(tree.shape)) if isinstance(tree, Tensor) else f"{{{', '.join(name for name, _ in tensors(tree))}}}"


def adds_up(loss: nn.Module, output: Any, target: Any, size: int) -> bool:
    """Whether the loss of a batch of `size` samples is the mean of those of its parts.

    One that draws at random cannot be told, and is taken to be; so is one whose outputs are not a row a sample.
    """
    whole, again = (float(mean(loss, output, target, size)) for _ in range(2))
    cut = size // 3
    rows = {len(tensor) for tree in (output, target) for _, tensor in tensors(tree) if tensor.ndim}
    if whole != again or not cut or rows != {size}:
        return True
    total = weight = 0.0
    for part in (slice(None, cut), slice(cut, size)):
        outputs, targets = taken(output, part), taken(target, part)
        share = float(weigh(loss, targets))
        total += share * float(mean(loss, outputs, targets, part.stop - (part.start or 0))) if share else 0.0
        weight += share
    return math.isclose(whole, total / (weight or 1.0), rel_tol=_ROUNDING, abs_tol=_ROUNDING)
