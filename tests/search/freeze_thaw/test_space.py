"""The encoding of configurations as numbers and back, with rounding and conditional parameters."""

from __future__ import annotations

import math

import numpy as np
import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from hpsearch.search.freeze_thaw.space import Space

ALL = {
    "lr": FloatDistribution(1e-5, 1e-1, log=True),
    "momentum": FloatDistribution(0.0, 0.99),
    "dropout": FloatDistribution(0.0, 0.5, step=0.05),
    "layers": IntDistribution(1, 8),
    "width": IntDistribution(16, 512, log=True),
    "batch": IntDistribution(32, 256, step=32),
    "optimizer": CategoricalDistribution(["adam", "sgd", None]),
}


def drawn(distributions: dict, seed: int) -> dict:
    """Return a configuration sampled by Optuna."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed))
    return study.ask(distributions).params


@given(st.integers(0, 2**31 - 1))
def test_encoding_and_decoding_round_trips(seed):
    space, params = Space(ALL, []), drawn(ALL, seed)
    again = space.to_params(np.array(space.to_row(params)))
    assert again == pytest.approx(params) if params["optimizer"] is None else again.keys() == params.keys()
    for name, value in params.items():
        assert again[name] == (pytest.approx(value) if isinstance(value, float) else value)


def test_candidates_are_valid_configurations():
    space, random = Space(ALL, []), np.random.default_rng(0)
    rows = space.sample(random, 200)
    rows = np.concatenate([rows, space.perturb(random, rows[:5], 20)])
    for row in rows:
        params = space.to_params(row)
        assert params.keys() == ALL.keys()
        assert all(ALL[name]._contains(ALL[name].to_internal_repr(value)) for name, value in params.items())
        np.testing.assert_allclose(space.to_row(params), row, atol=1e-9)


def test_neighbours_are_near_and_most_choices_stay():
    space, random = Space(ALL, []), np.random.default_rng(0)
    row = np.array([space.to_row(drawn(ALL, 1))])
    near, far = space.to_features(space.perturb(random, row, 300)), space.to_features(space.sample(random, 300))
    here = space.to_features(row)
    assert np.median(np.linalg.norm(near - here, axis=1)) < 0.5 * np.median(np.linalg.norm(far - here, axis=1))


def test_distances_between_choices_and_to_absent_parameters():
    space = Space({"kind": CategoricalDistribution(["a", "b", "c"]), "lr": FloatDistribution(0, 1)}, [])
    rows = np.array([[0, 0.0], [1, 0.0], [0, 1.0], [0, math.nan]])
    features = space.to_features(rows)
    distance = np.linalg.norm(features[0] - features[1:], axis=1)
    np.testing.assert_allclose(distance[:2], 1.0)
    assert distance[2] == pytest.approx(math.sqrt(0.5))
    assert list(space.param_by_feature) == [0, 0, 0, 1, 1]


def nested(trial) -> None:
    if trial.suggest_categorical("model", ["mlp", "cnn"]) == "mlp":
        for layer in range(trial.suggest_int("layers", 1, 4)):
            trial.suggest_int(f"width_{layer}", 8, 64)
    elif trial.suggest_categorical("pool", ["max", "mean", "none"]) != "none":
        trial.suggest_float("stride", 1, 3)


def of_two(trial) -> None:
    """Suggest a momentum that depends on two choices, and a depth that depends on a choice and a number."""
    optimizer = trial.suggest_categorical("optimizer", ["sgd", "adam", "lion"])
    width = trial.suggest_int("width", 8, 64, step=8)
    if trial.suggest_categorical("schedule", ["cosine", "constant"]) == "cosine":
        if optimizer == "sgd":
            trial.suggest_float("momentum", 0.0, 0.99)
        if width >= 32:
            trial.suggest_int("depth", 1, 4)
    trial.suggest_float("lr", 1e-4, 1e-1, log=True)


@pytest.mark.parametrize("conditional", [nested, of_two])
def test_conditional_parameters_are_learnt_from_trials(conditional):
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(0))
    for _ in range(60):
        trial = study.ask()
        conditional(trial)
        study.tell(trial, 0.0)
    distributions = {name: d for trial in study.trials for name, d in trial.distributions.items()}
    space = Space(distributions, [trial.params for trial in study.trials])
    random = np.random.default_rng(1)
    rows = space.sample(random, 300)
    for row in np.concatenate([rows, space.perturb(random, rows[:10], 20)]):
        params = space.to_params(row)
        asked = optuna.trial.FixedTrial(params)
        conditional(asked)  # raises if a parameter is missing
        assert asked.params.keys() == params.keys()


def test_a_configuration_without_a_parameter_equals_a_row_that_only_adds_it():
    kind, number = CategoricalDistribution(["a", "b"]), FloatDistribution(0, 1)
    space = Space({"kind": kind, "lr": number, "momentum": number}, [])
    others = np.array([[0, 0.5, math.nan], [1, 0.5, 0.25]])
    rows = np.array([[0, 0.5, 0.7], [0, 0.5, math.nan], [1, 0.5, 0.7], [1, 0.5, math.nan], [1, 0.5, 0.25 + 1e-12]])
    assert space.contains_same_trial(rows, others).tolist() == [True, True, False, False, True]


def test_a_parameter_without_a_condition_counts_as_present():
    distributions = {"a": FloatDistribution(0, 1), "b": FloatDistribution(0, 1)}
    seen = [{"a": 0.1, "b": 0.5}, {"a": 0.5}, {"a": 0.9, "b": 0.5}]
    rows = Space(distributions, seen).sample(np.random.default_rng(0), 20)
    assert not np.isnan(rows).any()


def test_values_outside_of_a_narrowed_range_are_accepted():
    space = Space({"lr": FloatDistribution(1e-3, 1e-1, log=True)}, [{"lr": 1.0}, {"lr": 1e-6}, {"lr": 1e-2}])
    np.testing.assert_allclose(space.rows[:, 0], [1.0, 0.0, 0.5])
