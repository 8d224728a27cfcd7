"""An exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel


def averaged(model: nn.Module, decay: float) -> AveragedModel:
    """The moving average of a model's weights; its buffers follow the model's.

    The decay starts low, min(decay, (1 + n) / (10 + n)) after n updates, so that a short run is not mostly its
    initial weights.
    """

    @torch.no_grad()
    def update(averages: Sequence[Tensor], current: Sequence[Tensor], count: Tensor | int) -> None:
        steps = int(count)
        torch._foreach_lerp_(list(averages), list(current), 1 - min(decay, (1 + steps) / (10 + steps)))

    return AveragedModel(model, multi_avg_fn=update)
