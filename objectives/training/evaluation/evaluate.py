"""Judging a model on a split: exact sums over samples, read from the device once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from objectives.errors import ObjectiveError
from objectives.training.data.dataset import Dataset
from objectives.training.data.loader import loaded
from objectives.training.evaluation.losses import mean, weigh
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
    """The mean loss, as "loss", and each metric, over a whole dataset.

    The model runs in evaluation mode and fp32, as it will when it is served; its mode is put back.

    Args:
        model: on `device`.
        dataset: on any device.
        loss: (output, target) -> losses [n] or their mean; of a form that adds up.
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
        weight: Tensor | int = 0
        for x, y in _batches(dataset, batch_size, torch.device(device), num_workers):
            output = model(x)
            share = weigh(loss, y)
            total += mean(loss, output, y) * share
            weight = weight + share
            metrics.update(output, y)
        return as_floats({"loss": total / weight, **metrics.compute()})
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


def as_floats(values: Mapping[str, Any]) -> dict[str, float]:
    """Scalars as floats, read from the device in one go."""
    tensors = {name: torch.as_tensor(value).double() for name, value in values.items()}
    for name, tensor in tensors.items():
        if tensor.numel() != 1:
            raise ObjectiveError(f"metric {name!r} must be one number, not {list(tensor.shape)}")
    device = next((t.device for t in tensors.values() if t.device.type != "cpu"), torch.device("cpu"))
    stacked = torch.stack([tensor.reshape(()).to(device) for tensor in tensors.values()])
    return dict(zip(tensors, stacked.tolist(), strict=True))
