"""Problems with two metrics: the metric of an objective of the benchmark, and the size or speed of its networks.

The second metric is the decimal logarithm of the number of parameters of the network, which is built by the objective,
or of the seconds of an epoch, which are predicted from the durations of the trainings of the learning curves. The
reported seconds of each epoch have a noise of 5 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np
import optuna
import torch
from sklearn.ensemble import ExtraTreesRegressor

from benchmarks.search_quality.curves import read_curves
from benchmarks.search_quality.problems import PROBLEMS, Problem
from benchmarks.search_quality.space import encode
from benchmarks.search_quality.surrogates import Family, Surrogate, surrogate

Second = Literal["parameters", "seconds"]

SECONDS: dict[str, Second] = {
    "digits": "parameters",
    "series": "seconds",
    "breast_cancer": "parameters",
    "denoise": "parameters",
    "gan": "seconds",
}

NOISE = 0.05  # relative standard deviation of the seconds of an epoch
RANDOM = 1000  # random configurations for the reference point


@dataclass(frozen=True)
class TwoMetrics:
    """A replacement for the training of an objective whose networks should be good and small, or good and fast.

    Attributes:
        problem: the objective.
        second: the second metric.
        curves: the surrogate of the first metric.
    """

    problem: Problem
    second: Second
    curves: Surrogate

    @property
    def maximize(self) -> tuple[bool, bool]:
        """Whether higher values are better, for each metric."""
        return self.problem.maximize, False

    @property
    def directions(self) -> list[str]:
        return ["maximize" if higher else "minimize" for higher in self.maximize]

    def trial(self, params: Mapping[str, Any], random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return the values [epochs, 2] of one training of a configuration, and the true ones."""
        shown, true = self.curves.trial(params, random)
        second = self.cost(params)
        deviation = NOISE / math.log(10) if self.second == "seconds" else 0.0
        costs = second + deviation * random.standard_normal(len(shown))
        return np.column_stack([shown, costs]), np.column_stack([true, np.full(len(true), second)])

    def cost(self, params: Mapping[str, Any]) -> float:
        """Return the second metric of a configuration."""
        if self.second == "parameters":
            return math.log10(parameters(self.problem, params))
        x = encode(self.problem.objective, params)[None].astype(np.float32)
        return float(np.mean([tree.predict(x) for tree in durations(self.curves.name)]))


@cache
def two_metrics(name: str, family: Family) -> TwoMetrics:
    """Return the two-metric problem of an objective of the benchmark."""
    return TwoMetrics(PROBLEMS[name], SECONDS[name], surrogate(name, family))


@cache
def reference(name: str, family: Family) -> tuple[float, float]:
    """Return the reference point as losses: the median of random configurations, and their largest or slowest."""
    training = two_metrics(name, family)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(0))
    found = []
    for _ in range(RANDOM):
        trial = study.ask()
        training.problem.objective().configure(trial)
        found.append((training.curves.true(trial.params)[-1], training.cost(trial.params)))
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    losses = np.array(found) * np.where(training.maximize, -1.0, 1.0)
    return float(np.median(losses[:, 0])), float(losses[:, 1].max())


@cache
def durations(name: str) -> list[Any]:
    """Return trees that predict the logarithm of the seconds of an epoch.

    Some trainings took longer because others ran on the same machine: a leaf averages at least five.
    """
    curves, problem = read_curves(name), PROBLEMS[name]
    x = np.array([encode(problem.objective, curve.params) for curve in curves])
    y = np.log10([curve.seconds / problem.epochs for curve in curves])
    forest = ExtraTreesRegressor(50, min_samples_leaf=5, random_state=0).fit(x, y)
    return [tree.tree_ for tree in forest.estimators_]


def parameters(problem: Problem, params: Mapping[str, Any]) -> int:
    """Return the number of parameters of the network that the objective builds."""
    objective, _ = _objective(problem)
    config = objective.configure(optuna.trial.FixedTrial(dict(params)))
    settings = tuple(sorted((key, value) for key, value in config.model.items() if key != "dropout"))
    return _count(problem, settings)


@cache
def _objective(problem: Problem) -> tuple[Any, Any]:
    objective: Any = problem.objective()
    return objective, objective.data(0).train


@cache
def _count(problem: Problem, settings: tuple[tuple[str, Any], ...]) -> int:
    objective, train = _objective(problem)
    config = replace(objective.default_config(), model=dict(settings))
    with torch.device("meta"):  # without memory and initialisation
        network = objective.model(config, train)
    return sum(parameter.numel() for parameter in network.parameters())
