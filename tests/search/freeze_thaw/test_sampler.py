"""The sampler learns from reported values, equally in any process, and stores only its hyperparameters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState

from hpsearch.search.freeze_thaw.forecast import score_interval_to_metric
from hpsearch.search.freeze_thaw.forecast_text import SUGGESTION_REASON_KEY, format_suggestion_reason
from hpsearch.search.freeze_thaw.gp_dataset import HYPERPARAMETERS_KEY, REFIT_GROWTH
from hpsearch.search.freeze_thaw.observations import Observations
from hpsearch.search.freeze_thaw.sampler import FreezeThawSampler
from hpsearch.storage.attributes import ORIGIN
from tests.factories import X
from tests.search.freeze_thaw.support import EPOCHS, curve, pruned, study_of, suggestion

LR = FloatDistribution(1e-4, 1.0, log=True)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("epochs", [2, EPOCHS])
def test_suggestions_are_near_the_predicted_optimum(sign, epochs):
    study = study_of([0.0, 0.1, 0.2, 0.35, 0.5, 0.6, 0.8, 0.9, 0.95, 1.0], epochs=epochs, sign=sign)
    assert suggestion(study) == pytest.approx(0.7, abs=0.06)


def test_a_search_ends_nearer_to_the_optimum_than_random_search():
    def best(sampler) -> float:
        study = optuna.create_study()
        for number in range(30):
            study.sampler = sampler(number)
            trial = study.ask()
            x, lr = trial.suggest_float("x", 0.0, 1.0), trial.suggest_float("lr", 1e-4, 1.0, log=True)
            value = (x - 0.7) ** 2 + (np.log10(lr) + 1) ** 2 / 9
            trial.report(value + 0.1, 0)
            trial.report(value, EPOCHS - 1)
            study.tell(trial, value)
        return study.best_value

    chosen = best(lambda number: FreezeThawSampler(seed=number, epochs=EPOCHS, random_fraction=0.0))
    assert chosen < 0.2 * best(optuna.samplers.RandomSampler)


def test_running_configurations_are_not_suggested_again():
    study = study_of([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], epochs=EPOCHS)
    first = suggestion(study, n_startup_trials=5)
    others = [suggestion(study, seed, n_startup_trials=5) for seed in range(1, 4)]
    assert len({round(x, 4) for x in [first, *others]}) == 4


def test_suggestions_avoid_diverged_configurations():
    """They have no values, or an infinite one, and rank below all others."""
    values = [{0: float("inf")}, {}, {0: float("nan")}]
    study = study_of([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
    for x, found in zip(np.linspace(0.6, 1.0, 9), values * 3, strict=True):
        study.add_trial(pruned({"x": x}, {"x": X}, found))
    assert suggestion(study) < 0.62


def test_the_first_suggestions_are_random():
    study = study_of([0.1] * 9)
    found = {round(suggestion(study, seed), 9) for seed in range(5)}
    assert len(found) == 5
    assert HYPERPARAMETERS_KEY not in study._storage.get_study_system_attrs(study._study_id)
    drawn = optuna.create_study(sampler=optuna.samplers.RandomSampler(3)).ask().suggest_float("x", 0.0, 1.0)
    assert suggestion(study_of([]), 3) == drawn


def test_hyperparameters_are_refitted_only_after_many_new_trials():
    study = study_of(list(np.linspace(0, 1, 12)))

    def fitted() -> dict:
        return study._storage.get_study_system_attrs(study._study_id)[HYPERPARAMETERS_KEY]

    suggestion(study)
    first = fitted()
    assert first["trials"] == 12
    suggestion(study, 1)
    assert fitted() == first
    for x in np.linspace(0.01, 0.99, int(12 * REFIT_GROWTH) - 12 + 1):
        study.add_trial(pruned({"x": x}, {"x": X}, curve(x)))
    suggestion(study, 2)
    assert fitted()["trials"] == len(study.get_trials(states=(TrialState.PRUNED,)))
    assert fitted()["theta"] != first["theta"]


def test_a_fraction_of_suggestions_is_random():
    study = study_of(list(np.linspace(0, 1, 12)))
    near = sum(abs(suggestion(study, seed, random_fraction=0.3) - 0.7) < 0.1 for seed in range(60))
    assert 0.5 * 60 < near < 0.9 * 60
    assert len({round(suggestion(study, seed, random_fraction=1.0), 6) for seed in range(20)}) == 20


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_a_fraction_of_the_random_trials_is_near_the_default_configuration(fraction):
    study = optuna.create_study()
    study.enqueue_trial({"x": 0.9, "kind": "b", "width": "not a number"}, user_attrs={ORIGIN: "default"})
    study.ask()
    sampled = []
    for seed in range(200):
        study.sampler = FreezeThawSampler(seed=seed, epochs=EPOCHS, near_default_fraction=fraction)
        trial = study.ask()
        sampled.append((trial.suggest_float("x", 0, 1), trial.suggest_categorical("kind", ["a", "b"])))
        assert 8 <= trial.suggest_int("width", 8, 64) <= 64  # the value of the default is not in the range
    xs, kinds = zip(*sampled, strict=True)
    assert np.mean([x > 0.65 for x in xs]) == pytest.approx(0.35 + fraction * 0.41, abs=0.1)
    assert np.mean([kind == "b" for kind in kinds]) == pytest.approx(0.5 + fraction / 3, abs=0.1)
    assert min(xs) >= 0
    assert max(xs) <= 1


def test_a_parameter_added_later_is_sampled():
    study = study_of(list(np.linspace(0, 1, 12)))
    suggestion(study)
    for lr in np.geomspace(1e-4, 1, 10):
        study.add_trial(pruned({"x": 0.7, "lr": lr}, {"x": X, "lr": LR}, curve(0.7 + abs(np.log10(lr) + 2))))
    study.sampler = FreezeThawSampler(seed=0, epochs=EPOCHS, random_fraction=0.0)
    assert study.ask().relative_params.keys() == {"lr", "x"}
    kept = study._storage.get_study_system_attrs(study._study_id)[HYPERPARAMETERS_KEY]
    assert kept["names"] == ["lr", "x"]


def test_a_tried_corner_of_the_space_is_not_suggested_again():
    study = optuna.create_study()
    for number in range(14):
        x = 1.0 if number > 9 else number / 10
        study.add_trial(pruned({"x": x}, {"x": X}, {0: 1.0 - x, 1: 1.0 - x}))
    study.add_trial(optuna.trial.create_trial(state=TrialState.RUNNING, params={"x": 0.0}, distributions={"x": X}))
    found = [suggestion(study, seed) for seed in range(5)]
    assert not {0.0, 1.0} & set(found)
    assert min(found) > 0.8


def both(optimizer: str, schedule: str) -> bool:
    return optimizer == "sgd" and schedule == "cosine"


def either(optimizer: str, schedule: str) -> bool:
    return optimizer == "sgd" or schedule == "cosine"


@pytest.mark.parametrize("has_momentum", [both, either])
def test_no_configuration_is_repeated_if_a_parameter_depends_on_two_others(has_momentum):
    study = optuna.create_study()
    for number in range(36):
        study.sampler = FreezeThawSampler(seed=number, epochs=1, random_fraction=0.0)
        trial = study.ask()
        optimizer = trial.suggest_categorical("optimizer", ["sgd", "adam"])
        schedule = trial.suggest_categorical("schedule", ["cosine", "constant"])
        width = trial.suggest_int("width", 1, 10)
        if has_momentum(optimizer, schedule):
            trial.suggest_int("momentum", 1, 10)
        value = abs(width - 4) + (optimizer == "sgd") + (schedule == "cosine")
        trial.report(value, 0)
        study.tell(trial, value)
    tried = [trial.params for trial in study.trials]
    suggested = [t.number for t in study.trials if SUGGESTION_REASON_KEY in t.system_attrs]
    assert len(suggested) == 26
    assert not [number for number in suggested if tried[number] in tried[:number]]


def test_a_parameter_with_one_value_is_ignored():
    study = optuna.create_study()
    for x in np.linspace(0, 1, 12):
        shape = {"x": X, "fixed": FloatDistribution(3.0, 3.0)}
        study.add_trial(pruned({"x": x, "fixed": 3.0}, shape, curve(x)))
    assert suggestion(study) == pytest.approx(0.7, abs=0.06)
    trial = study.ask()
    trial.suggest_float("fixed", 3.0, 3.0)  # sampled first, a constant
    trial.suggest_float("x", 0.0, 1.0)
    assert SUGGESTION_REASON_KEY in study.trials[-1].system_attrs


def test_a_suggestion_stores_its_reason():
    study = study_of(list(np.linspace(0.0, 1.0, 11)), sign=-1.0)
    x = suggestion(study)
    note = study.trials[-1].system_attrs[SUGGESTION_REASON_KEY]
    low, high = note["band"]
    ends = [-min(curve(x).values()) for x in np.linspace(0.0, 1.0, 11)]
    assert low < high
    assert low <= note["foreseen"] <= high <= max(ends)
    assert note["best"] == pytest.approx(max(ends), abs=0.02)
    assert note["near"] is None or abs(study.trials[note["near"]].params["x"] - x) < 0.5
    assert "best then" in format_suggestion_reason(note)


def test_partly_fixed_configurations_have_no_stored_reason():
    study = optuna.create_study()
    for number, x in enumerate(np.linspace(0.0, 1.0, 14)):
        params = {"x": x, "lr": 10 ** -(number % 4)}
        study.add_trial(pruned(params, {"x": X, "lr": LR}, curve(x)))
    study.enqueue_trial({"x": 0.25})
    study.sampler = FreezeThawSampler(seed=0, epochs=EPOCHS, random_fraction=0.0)
    for given in (True, False):
        trial = study.ask()
        trial.suggest_float("lr", 1e-4, 1.0, log=True)  # the sampler chooses it before the fixed parameter
        assert (trial.suggest_float("x", 0.0, 1.0) == 0.25) == given
        assert (SUGGESTION_REASON_KEY in study.trials[trial.number].system_attrs) != given


@pytest.mark.parametrize(("maximize", "expected"), [(False, (2.0, 1.0, 3.0)), (True, (-2.0, -3.0, -1.0))])
def test_scores_are_converted_back_to_values(maximize, expected):
    points = Observations(np.arange(4), np.ones(4), np.array([3.0, np.inf, 1.0, 2.0]))
    two = float(points.scores[3])
    assert score_interval_to_metric(points, two, 100.0, maximize=maximize) == pytest.approx(expected)


def test_a_stored_reason_fits_80_columns():
    note = {"foreseen": 0.96214, "band": [0.94811, 0.97123], "best": 0.95814, "near": 1234}
    assert format_suggestion_reason(note) == "forecast 0.9621 (0.9481 to 0.9712), best then 0.9581; near trial 1234"
    assert format_suggestion_reason({**note, "near": None}).endswith("; best of many random candidates")
    assert len(format_suggestion_reason(note)) + len("   curves  ") <= 80


PROGRAM = """
import sys
from tests.search.freeze_thaw.test_sampler import two_suggestions
print(two_suggestions(sys.argv[1]))
"""


def two_suggestions(url: str) -> list[float]:
    """The second suggestion reads the fitted hyperparameters from the study."""
    studies = [optuna.load_study(study_name="s", storage=url) for _ in range(2)]
    return [suggestion(study, 5) for study in studies]


@pytest.mark.soak
def test_suggestions_depend_only_on_study_and_seed(tmp_path: Path):
    urls = [f"sqlite:///{tmp_path / name}" for name in ("a.db", "b.db")]
    for url in urls:
        study = optuna.create_study(study_name="s", storage=url)
        study.add_trials([pruned({"x": x}, {"x": X}, curve(x, 3)) for x in np.linspace(0, 1, 14)])
    command = [sys.executable, "-c", PROGRAM, urls[1]]
    other = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert other.stdout == f"{two_suggestions(urls[0])}\n"
