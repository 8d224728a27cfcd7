"""Studies of an attacker, and the output of the victim's commands."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
from optuna.distributions import FloatDistribution
from torch import nn

from hpsearch import Dataset, Objective, Splits, TrainConfig
from hpsearch.storage.attributes import SPEC
from hpsearch.storage.study_storage.storage import PostgresStorage
from tests.factories import spec_of

TOKEN = "0123456789abcdef"


def make_study(storage: PostgresStorage, **attrs: Any) -> int:
    """Create a study as a worker's role can, with attributes of the attacker's choice and a finished trial."""
    study = optuna.create_study(study_name="s", storage=storage)
    for key, value in {SPEC: spec_of(name="none").model_dump(), **attrs}.items():
        storage.set_study_user_attr(study._study_id, key, value)
    study.add_trial(optuna.trial.create_trial(value=0.5))
    return study._study_id


def read_error(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the only line on stderr."""
    error = capsys.readouterr().err
    assert error.startswith("hpsearch: ")
    assert error.count("\n") == 1
    return error


class Mine(Objective):
    name, metric, direction = "mine", "accuracy", "maximize"

    def data(self, seed: int) -> Splits:
        raise NotImplementedError

    def model(self, config: TrainConfig, train: Dataset) -> nn.Module:
        raise NotImplementedError

    def suggest(self, trial: Any) -> TrainConfig:
        lr = trial.suggest_float("lr", 0.1, 1.0)
        return TrainConfig(lr=lr, model={"start": "zeros.pt", "tag": f"trial-{trial.number}"})


def make_trial(lr: float) -> optuna.trial.FrozenTrial:
    trial = optuna.trial.create_trial(value=0.5, params={"lr": lr}, distributions={"lr": FloatDistribution(0.0, 2.0)})
    trial.number = 3
    return trial
