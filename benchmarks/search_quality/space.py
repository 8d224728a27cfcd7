"""The search space of an objective: the distributions of all branches, and configurations as vectors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from hpsearch.objectives.base_objective import BaseObjective

Params = Mapping[str, Any]

DRAWS = 100  # enough to visit every branch of a conditional space


@cache
def distributions(objective: type[BaseObjective]) -> dict[str, BaseDistribution]:
    """Return the distributions of all parameters of all branches, sorted by name."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(0))
    found: dict[str, BaseDistribution] = {}
    for _ in range(DRAWS):
        trial = study.ask()
        objective().configure(trial)
        found |= trial.distributions
    return dict(sorted(found.items()))


def active(objective: type[BaseObjective], flat: Params) -> dict[str, Any]:
    """Return the active parameters among values for all parameters."""
    trial = optuna.trial.FixedTrial(dict(flat))
    objective().configure(trial)
    return dict(trial.params)


def encode(objective: type[BaseObjective], params: Params) -> np.ndarray:
    """Return a configuration as numbers from 0 to 1: a column per choice; 0.5 for an inactive number."""
    columns: list[float] = []
    for name, distribution in distributions(objective).items():
        value = params.get(name)
        match distribution:
            case CategoricalDistribution(choices=choices):
                columns += [float(name in params and choice == value) for choice in choices]
            case FloatDistribution() | IntDistribution():
                columns.append(0.5 if value is None else share(distribution, float(value)))
            case _:
                raise TypeError(f"{name}: {distribution}")
    return np.array(columns)


def share(distribution: FloatDistribution | IntDistribution, value: float) -> float:
    """Return the position of a value in its range, from 0 to 1, on a logarithmic scale if the distribution has one."""
    low, high = float(distribution.low), float(distribution.high)
    if distribution.log:
        low, high, value = math.log(low), math.log(high), math.log(value)
    return (value - low) / (high - low)
