"""Preprocessing modules, fitted on training data and exported with the model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpsearch.objectives.training.data.samples import MemmapRows


class Standardize(nn.Module):
    """Standardization (x - mean) / std by statistics of the training data. Input and output [n, ...], any float type.

    The statistics are buffers, so they are in the state dict and in the exported model.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    @classmethod
    def fit(cls, x: Tensor | MemmapRows, dim: int | tuple[int, ...] = 0) -> Standardize:
        """Return a module with statistics of `x` over `dim`: 0 standardizes each feature, (0, 2, 3) each image channel.

        Constant features are centered but not scaled. Memory-mapped rows are read in parts.
        """
        if isinstance(x, MemmapRows):
            count: float = 0
            sums = squares = torch.zeros(())
            for part in x.batches():
                values = part.to(torch.float64)
                sums = sums + values.sum(dim=dim, keepdim=True)
                squares = squares + values.square().sum(dim=dim, keepdim=True)
                count += values.numel() / sums.numel()
            mean = sums / count
            std = (squares / count - mean.square()).clamp_min(0).sqrt()
        else:
            values = x.to(torch.float64)
            mean = values.mean(dim=dim, keepdim=True)
            std = values.std(dim=dim, keepdim=True, correction=0)
        std = torch.where(std > 1e-12, std, torch.ones_like(std))
        return cls(mean[0].to(torch.float32), std[0].to(torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """Return the standardized `x`, in the same shape."""
        return (x - self.mean) / self.std
