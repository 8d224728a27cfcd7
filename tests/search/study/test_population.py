"""The parameters that population-based training may change are found, or checked, before a study is created."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from hpsearch import Dataset, TrainConfig
from hpsearch.objectives.base_objective import BaseObjective
from hpsearch.objectives.builtin.gan import Gan
from hpsearch.search.errors import SearchError
from hpsearch.search.spec.spec import parse_spec
from hpsearch.search.study.population import fit_population
from tests.objectives.training.support import Wine


class Searched(Wine):
    name = "searched"

    def suggest(self, trial: Any) -> TrainConfig:
        hidden = trial.suggest_int("hidden", 4, 8)
        kind = trial.suggest_categorical("optimizer", ["adamw", "sgd"])
        momentum = trial.suggest_float("momentum", 0.5, 0.9) if kind == "sgd" else 0.9
        upper = trial.suggest_int("upper", 8, 16)
        batch_size = trial.suggest_int("batch_size", 4, upper)
        settings = {"lr": trial.suggest_float("lr", 1e-3, 1e-1, log=True), "batch_size": batch_size}
        return TrainConfig(optimizer=kind, momentum=momentum, model={"hidden": hidden}, **settings)

    def model(self, config: TrainConfig, train: Dataset) -> nn.Module:
        return nn.Sequential(nn.Linear(13, config.model["hidden"]), nn.Linear(config.model["hidden"], 3))


def fit(objective: BaseObjective, parameters: str | None = None) -> list[str]:
    values = {"name": "s", "objective": "x", "metric": "accuracy", "direction": "maximize", "n_trials": 4, "epochs": 4}
    spec = parse_spec({**values, "pruner": {"name": "pbt", "parameters": parameters}})
    found: list[str] = fit_population(spec, objective).pruner.options["parameters"]
    return found


def test_numerical_parameters_that_keep_the_state_are_found() -> None:
    assert fit(Searched()) == ["lr", "momentum"], "the range of batch_size depends on another parameter"


def test_given_parameters_are_checked() -> None:
    assert fit(Searched(), "lr") == ["lr"]
    for given, message in (
        (
            "lr, hidden",
            "hidden cannot change during the training: it changes the names or shapes of the model's weights",
        ),
        ("optimizer", "optimizer cannot change during the training: it is not a number with several values"),
        ("upper", "upper cannot change during the training: other parameters depend on it"),
        ("lrr", "searched has no parameter 'lrr'; did you mean 'lr'"),
    ):
        with pytest.raises(SearchError, match=f"pruner.parameters: {message}"):
            fit(Searched(), given)


def test_a_custom_loop_is_rejected() -> None:
    with pytest.raises(SearchError, match="--pruner pbt is not available for gan, which has a custom loop"):
        fit(Gan())
