"""Judging a model on a split: exact sums over samples, read from the device once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from objectives.errors import ObjectiveError
from objectives.training.data.dataset import Dataset
from objectives.training.data.loader import loaded
from objectives.training.evaluation.metrics import Metrics


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    dataset: Dataset,
    loss: nn.Module,
    metrics: Metrics,
    *,
    batch_size: int,
    device: torch.device | str,
    num_workers: int = 0,
) -> dict[str, float]:
    """The mean loss per sample, as "loss", and each metric, over a whole dataset.

    The model runs in evaluation mode and fp32, as it will when it is served; its mode is put back.

    Args:
        model: on `device`.
        dataset: on any device.
        loss: (output, target) -> losses [n] or their mean.
        metrics: reset before use, on `device`.
        batch_size: rows in one forward pass; the answer does not depend on it.
        device: where the model is.
        num_workers: processes that load a dataset which is not in memory.
    """
    training = model.training
    model.eval()
    try:
        metrics.reset()
        total = torch.zeros((), dtype=torch.float64, device=device)
        for x, y in _batches(dataset, batch_size, torch.device(device), num_workers):
            output = model(x)
            total += summed(loss, output, y)
            metrics.update(output, y)
        return as_floats({"loss": total / len(dataset), **metrics.compute()})
    finally:
        model.train(training)


def _batches(dataset: Dataset, size: int, device: torch.device, num_workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    if dataset.load is None:
        for start in range(0, len(dataset), size):
            rows = slice(start, start + size)
            yield dataset.x[rows].to(device), dataset.y[rows].to(device)
        return
    found = torch.split(torch.arange(len(dataset)), size)
    for x, y in loaded(dataset, found, device=device, num_workers=num_workers):
        yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)


def summed(loss: nn.Module, output: Tensor, target: Tensor) -> Tensor:
    """The sum of the losses of a batch, in fp32: sums add up over uneven batches, means do not."""
    return mean(loss, output, target) * len(target)


def mean(loss: nn.Module, output: Tensor, target: Tensor) -> Tensor:
    """The mean over the samples of a batch of their losses, in fp32."""
    value: Tensor = loss(output.float(), target).float()
    if value.ndim == 0:
        return value
    if value.shape[0] != len(target):
        raise ObjectiveError(f"the loss gave {list(value.shape)} for {len(target)} samples: give [n], or the mean")
    return value.mean()


def check_loss(loss: nn.Module) -> None:
    """Refuses a loss whose value is not the mean over samples.

    Raises:
        ObjectiveError: `reduction="sum"`, or class weights in a mean: torch divides that by the sum of the weights
            in the batch, so batches cannot be added up.
    """
    reduction = getattr(loss, "reduction", "none")
    if reduction == "sum":
        raise ObjectiveError(f"{type(loss).__name__} must not use reduction='sum': use 'none' or 'mean'")
    weighted = isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) and loss.weight is not None
    if weighted and reduction == "mean":
        raise ObjectiveError(f"{type(loss).__name__} with class weights must use reduction='none'")


def as_floats(values: Mapping[str, Any]) -> dict[str, float]:
    """Scalars as floats, read from the device in one go."""
    tensors = {name: torch.as_tensor(value).double() for name, value in values.items()}
    for name, tensor in tensors.items():
        if tensor.numel() != 1:
            raise ObjectiveError(f"metric {name!r} must be one number, not {list(tensor.shape)}")
    device = next((t.device for t in tensors.values() if t.device.type != "cpu"), torch.device("cpu"))
    stacked = torch.stack([tensor.reshape(()).to(device) for tensor in tensors.values()])
    return dict(zip(tensors, stacked.tolist(), strict=True))
