"""An objective whose model does not see its inputs: it trains, and can learn nothing."""

from __future__ import annotations

import torch
from torch import nn

from tests.e2e.gated import Gated


class Blind(Gated):
    name = "blind"

    def model(self, config, train):
        return nn.Sequential(Unseeing(), nn.Linear(13, 3))


class Unseeing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)
