"""The default configuration of an objective."""

import math
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from torch import nn

from hpsearch import ObjectiveError, TrainConfig
from hpsearch.objectives.search_space import FixedTrial
from hpsearch.search.study.preflight import check_objective_code
from tests.factories import spec_of
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


def _numbered(_self, trial):
    trial.set_user_attr("parity", trial.number % 2)
    lr = trial.suggest_float("lr", 1e-4, 1e-2, log=True)
    return TrainConfig(lr=trial.params["lr"], model={"parity": trial.user_attrs["parity"], "lr": lr})


def test_suggest_may_use_the_attributes_of_a_trial_without_a_study(objective_with):
    assert objective_with(suggest=_numbered).default_config().model == {"parity": 0, "lr": pytest.approx(1e-3)}


def _of_a_study(_self, trial):
    return TrainConfig(lr=trial.suggest_float("lr", 1e-4, 1e-2), batch_size=8 + len(trial.study.trials))


def test_an_attribute_that_needs_a_study_is_found_before_the_study_exists(objective_with):
    with pytest.raises(ObjectiveError, match=r"\.suggest: .*test_default_config.py:\d+: AttributeError: .* 'study'"):
        check_objective_code(objective_with(suggest=_of_a_study), spec_of(name="none"))


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("float", ("x" * 513, 1e-4, 1e-2), r"^parameter 'x{40}...' has a name of 513 characters; use at most 512$"),
        ("float", ("a\0", 1e-4, 1e-2), r"^parameter 'a\\x00' has the name 'a\\x00', which contains a null character"),
        ("float", ("", 1e-4, 1e-2), r"^a parameter has an empty name; give it a name$"),
        ("float", ("a", math.nan, 1.0), r"^parameter 'a' has the bound nan; give a finite number$"),
        ("int", ("a", 1, math.inf), r"^parameter 'a' has the bound inf; give a finite number$"),
        (
            "categorical",
            ("a", [(64, 64), (128,)]),
            r"^parameter 'a' has the choice \(64, 64\), which is of type tuple, ",
        ),
        ("categorical", ("a", []), r"^parameter 'a' has no choices; give one or more$"),
        ("categorical", ("a", [None, 1, "1", True]), r"^parameter 'a' has the choices 1 and True, which are equal in"),
        ("categorical", ("a", ["b", "\udcff"]), r"^parameter 'a' has the choice '\\udcff', which .* not valid UTF-8"),
    ],
)
def test_a_parameter_that_the_database_rejects_is_found_before_the_study_exists(
    objective_with, kind, arguments, message
):
    def suggest(_self, trial):
        getattr(trial, f"suggest_{kind}")(*arguments)
        return TrainConfig()

    with pytest.raises(ObjectiveError, match=message):
        check_objective_code(objective_with(suggest=suggest), spec_of(name="none"))


def test_a_report_that_fails_does_not_fail_the_run(objective_with, tmp_path, no_plots):
    result = fit(objective_with(suggest=_of_a_study), epochs=1, run_dir=tmp_path)
    assert result.status == "completed"
    assert "no report: ObjectiveError: Changed.suggest" in (tmp_path / "train.log").read_text()


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


def test_a_user_attribute_that_the_database_cannot_store_is_an_error() -> None:
    trial = FixedTrial({})
    trial.set_user_attr("rows", [3, "x", None])
    with pytest.raises(ObjectiveError, match=r"^the user attribute 'n' has a value of type int64 that JSON cannot"):
        trial.set_user_attr("n", np.int64(3))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("x" * 513, r"^user attribute 'x{40}...' has a name of 513 characters; use at most 512$"),
        ("a\0", r"^user attribute 'a\\x00' has the name 'a\\x00', which contains a null character"),
        (3, r"^the name of a user attribute is 3, of type int; use a text$"),
    ],
)
def test_the_name_of_a_user_attribute_that_the_database_cannot_store_is_an_error(name: Any, reason: str) -> None:
    with pytest.raises(ObjectiveError, match=reason):
        FixedTrial({}).set_user_attr(name, 1)


class CountsSteps(nn.CrossEntropyLoss):
    """A loss whose buffers change, are converted, or are a cache for the last batch."""

    def __init__(self, name):
        super().__init__()
        self.register_buffer("steps", torch.ones(1))
        self.register_buffer("rows", torch.zeros(0), persistent=name == "cache")
        self.name = name

    def forward(self, output, target):
        if self.name == "in place":
            self.steps += 1
        elif self.name == "replaced":
            self.steps = self.steps + 1
        elif self.name == "converted":
            self.steps = self.steps.double() / 3 * 3
        else:
            self.rows = torch.arange(len(target))
        return super().forward(output, target)


@pytest.mark.parametrize("name", ["in place", "replaced"])
def test_a_loss_with_state_that_checkpoints_lack_is_rejected(objective_with, name):
    objective = objective_with(loss=lambda *_: CountsSteps(name))
    with pytest.raises(ObjectiveError, match=r"^the loss changes its state 'steps' in training, which checkpoints"):
        check_objective_code(objective, spec_of(name="none"))


@pytest.mark.parametrize(
    "loss",
    [
        CountsSteps("converted"),
        CountsSteps("cache"),
        nn.CrossEntropyLoss(weight=torch.ones(3)),
        torch.jit.script(nn.CrossEntropyLoss(weight=torch.ones(3))),
    ],
)
def test_a_loss_with_constant_state_is_accepted(objective_with, loss):
    check_objective_code(objective_with(loss=lambda *_: loss), spec_of(name="none"))
