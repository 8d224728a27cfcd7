"""An exported model must accept other sizes than those of its example."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hpsearch.storage.mlflow.model_export import export_model


class Sums(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(dim=1)


class LoopOverTime(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x[:, step] * step for step in range(x.shape[1])]).sum(dim=0)


class Distances(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x, torch.zeros(10, 5))  # computed differently from 26 rows on


def test_variable_sizes_stay_dynamic(tmp_path: Path) -> None:
    export_model(Sums(), [("x", torch.ones(4, 5))], [{0, 1}], tmp_path / "model")
    assert (tmp_path / "model" / "MLmodel").exists()


def test_a_length_that_torch_fixes_is_rejected(tmp_path: Path) -> None:
    inputs = [("x", torch.ones(4, 5))]
    with pytest.raises(ValueError, match=r"torch\.export fixed dimension 1 of x at size 5"):
        export_model(LoopOverTime(), inputs, [{0, 1}], tmp_path / "model")
    export_model(LoopOverTime(), inputs, [{0}], tmp_path / "model")


def test_sizes_that_torch_limits_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"torch\.export limited dimension 0 of x to sizes from 2 to 25"):
        export_model(Distances(), [("x", torch.ones(4, 5))], [{0, 1}], tmp_path / "model")
