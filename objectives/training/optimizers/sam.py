"""Sharpness-aware minimisation: the gradient is taken where the loss around the weights is worst."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class Sharpness:
    """The first of SAM's two passes (Foret et al. 2021), by pytorch-optimizer; the second is a step of its base.

    Its own `step` takes a closure, which a GradScaler cannot skip: weights would stay displaced.
    """

    def __init__(self, sam: Any) -> None:
        self._sam = sam

    @property
    def base(self) -> Optimizer:
        """The optimizer that takes the step."""
        base: Optimizer = self._sam.base_optimizer
        return base

    @contextmanager
    def displaced(self, model: nn.Module) -> Iterator[None]:
        """A region with the weights moved uphill along their gradients, which are cleared for the second pass.

        The direction does not depend on the gradients' size, so a scaled loss needs no unscaling. Batch norm's
        running statistics stand still: they belong to the weights that are kept.
        """
        from pytorch_optimizer.optimizer.utils.model import disable_running_stats, enable_running_stats

        self._sam.first_step(zero_grad=True)
        disable_running_stats(model)
        try:
            yield
        finally:
            enable_running_stats(model)
            self._put_back()

    @torch.no_grad()
    def _put_back(self) -> None:
        for group in self._sam.param_groups:
            for parameter in group["params"]:
                if (kept := self._sam.state[parameter].pop("old_p", None)) is not None:
                    parameter.copy_(kept)
