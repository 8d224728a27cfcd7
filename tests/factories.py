"""Specs, search spaces and directions that several tests use."""

from __future__ import annotations

from typing import Any

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution

from hpsearch.search.errors import SearchError
from hpsearch.search.spec.spec import StudySpec, parse_spec

SPACE = {"lr": FloatDistribution(1e-4, 1e-1, log=True), "kind": CategoricalDistribution(("cnn", "mlp"))}
X = FloatDistribution(0.0, 1.0)
WAYS = {"accuracy": "maximize", "latency_ms": "minimize"}
BASE: dict[str, Any] = {
    "name": "night",
    "objective": "digits",
    "metric": "accuracy",
    "direction": "maximize",
    "n_trials": 24,
    "epochs": 12,
}


# Source of an objective whose trials need no time.
LOOP_OBJECTIVE = """
from hpsearch import LoopObjective

class Loop(LoopObjective):
    metric, direction, epochs = "score", "maximize", 2

    def suggest(self, trial):
        return {"lr": trial.suggest_float("lr", 0.01, 1.0)}

    def run(self, trial):
        for _ in trial.epochs():
            trial.report({"score": 1.0})
"""


def spec_of(direction: str = "maximize", epochs: int = 20, **pruner: object) -> StudySpec:
    """Return the spec of a study with this pruner."""
    return parse_spec(
        {
            "name": "s",
            "objective": "digits",
            "metric": "accuracy",
            "direction": direction,
            "n_trials": 9,
            "epochs": epochs,
            "pruner": pruner,
        }
    )


def spec(**settings: Any) -> StudySpec:
    """Return the spec of a study of 100 trials of 9 epochs."""
    return parse_spec({"name": "s", "objective": "x", "n_trials": 100, "epochs": 9, **settings})


def refused(**settings: Any) -> str:
    """Return the error, of one line, with which `spec` rejects these settings."""
    with pytest.raises(SearchError) as error:
        spec(**settings)
    assert "\n" not in str(error.value)
    return str(error.value)
