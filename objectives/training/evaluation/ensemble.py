"""The models of a cross-validation as one model."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hpsearch.objectives.errors import ObjectiveError


class Ensemble(nn.Module):
    """The mean of the outputs of several models, such as those of the folds of a cross-validation.

    The outputs are those of `forward`: for a classifier usually logits. Each floating-point tensor [n, ...] of the
    output is averaged.

    Args:
        models: models of the same class, which are called with the same inputs.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

        @functools.wraps(models[0].forward)  # the names of the inputs, which the training loop and exporters read
        def forward(*inputs: Any, **named: Any) -> Any:
            outputs = [model(*inputs, **named) for model in self.models]
            return pytree.tree_map(_average, *outputs)

        self.forward = forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Ensemble:
        return Ensemble([copy.deepcopy(model, memo) for model in self.models])


def _average(*outputs: Any) -> Any:
    if not all(isinstance(output, torch.Tensor) and output.is_floating_point() for output in outputs):
        raise ObjectiveError(
            "--folds: the models of the folds cannot be averaged, because an output of the model is not a tensor of "
            "floating-point numbers; return such tensors, or remove --folds"
        )
    return torch.stack(outputs).mean(0)
