"""The default configuration of an objective."""

import optuna
import pytest

from hpsearch import ObjectiveError, TrainConfig
from hpsearch.objectives.search_space import FixedTrial
from tests.objectives.training.support import fit


def _wide(_self, trial):
    return TrainConfig(
        lr=trial.suggest_float("lr", 1e-4, 1e-2, log=True),
        weight_decay=trial.suggest_float("weight_decay", 0.0, 0.1, step=0.04),
        batch_size=trial.suggest_int("batch_size", 8, 128, log=True),
        gradient_accumulation_steps=trial.suggest_int("gradient_accumulation_steps", 1, 8, step=3),
        optimizer=trial.suggest_categorical("optimizer", ["sgd", "adamw"]),
    )


def test_the_default_is_the_middle_of_the_search_space(objective_with):
    found = objective_with(suggest=_wide).default_config()
    assert found.lr == pytest.approx(1e-3)
    assert found.weight_decay == pytest.approx(0.04)
    assert (found.batch_size, found.gradient_accumulation_steps, found.optimizer) == (32, 4, "sgd")


def test_every_middle_is_in_its_range():
    """Optuna accepts each default as a value of its distribution."""
    study = optuna.create_study()
    for low, high, step in ((1, 1, 1), (0, 6, 3), (3, 100, 1), (2, 9, 7)):
        middle = FixedTrial({}).suggest_int("n", low, high, step=step)
        study.enqueue_trial({"n": middle})
        trial = study.ask({"n": optuna.distributions.IntDistribution(low, high, step=step)})
        assert trial.params["n"] == middle


@pytest.mark.slow
def test_a_model_may_use_parameters_of_the_default_configuration(objective_with):
    def suggest(_self, trial):
        return TrainConfig(lr=0.02, model={"width": trial.suggest_int("width", 4, 64)})

    def model(self, config, train):
        assert config.model["width"] == 34
        return type(self).__mro__[1].model(self, config, train)

    objective = objective_with(suggest=suggest, model=model)
    assert fit(objective, objective.default_config(), epochs=1).history


def test_an_error_in_the_search_space_is_reported(objective_with):
    with pytest.raises(ObjectiveError, match=r"Changed.suggest: .*test_default_config.py:\d+: ZeroDivisionError"):
        objective_with(suggest=lambda *_: 1 / 0).default_config()
