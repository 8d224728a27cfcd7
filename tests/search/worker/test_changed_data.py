"""Trials whose data differ from those of the study's creation are marked, and the user is warned."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpsearch.search.api.study import Study
from hpsearch.search.finalists.text import format_data_warnings
from hpsearch.search.report import write_report
from hpsearch.storage.attributes import DATA_SHA256

OBJECTIVE = """
from pathlib import Path

import torch
from torch import nn

from hpsearch import Objective, Splits, TrainConfig


class Shifted(Objective):
    metric, direction, epochs = "loss", "minimize", 1

    def suggest(self, trial):
        return TrainConfig(lr=trial.suggest_float("lr", 0.01, 0.1))

    def data(self, seed):
        shift = float(Path("SHIFT").read_text())
        x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0)) + shift
        return Splits.make(x, x.sum(1, keepdim=True) + 0.1 * x[:, :1] ** 2, seed=seed)

    def model(self, config, train):
        return nn.Linear(3, 1)

    def loss(self, config, train):
        return nn.MSELoss()
"""


@pytest.mark.parametrize("folds", [None, 3])
def test_trials_with_other_data_than_the_study_are_reported(
    database_url: str, tmp_path: Path, folds: int | None
) -> None:
    shift = tmp_path / "shift.txt"
    shift.write_text("0")
    (tmp_path / "shifted.py").write_text(OBJECTIVE.replace("SHIFT", str(shift)))
    addresses = {"storage_url": database_url, "home": str(tmp_path / "home"), "tracking_uri": "http://127.0.0.1:9"}
    spec = {"objective": str(tmp_path / "shifted.py"), "name": "s", "n_trials": 1, "folds": folds}
    study = Study.create(spec=spec, **addresses)
    study.run_worker()
    assert format_data_warnings(study._stored) == []

    shift.write_text("1")
    study = Study.open("s", **addresses)
    study.extend("+2")
    study.run_worker()
    changed = [DATA_SHA256 in trial.user_attrs for trial in study.trials]
    assert changed == [False, True, True]
    (warning,) = format_data_warnings(study._stored)
    assert warning.startswith("warning: the data of trials 1, 2 differed from those of the study's creation")
    page = write_report(study._stored, tmp_path / "report.html", dashboard_url=None).read_text()
    assert "the data of trials 1, 2 differed" in page
