"""An exported model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from hpsearch.storage.mlflow.model_export import export_model


class Classifier(nn.Module):
    """A model with the inputs and outputs of the objective `digits`, which trains nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.flatten(1))


@pytest.fixture(scope="module")
def _exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "model"
    export_model(Classifier().eval(), [("", torch.randn(4, 1, 8, 8))], [{0}], folder)
    return folder


@pytest.fixture
def exported(_exported: Path, tmp_path: Path) -> Path:
    """Return a copy of an exported model that the test may change."""
    return Path(shutil.copytree(_exported, tmp_path / "model"))
