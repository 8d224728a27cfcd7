"""Objectives with several metrics: valid declarations, and errors of one line for invalid ones."""

import pytest

from hpsearch import LoopObjective, ObjectiveError, load_objective
from hpsearch.objectives.errors import MetricError
from hpsearch.objectives.model_metric_names import MODEL_METRICS, get_metric_value
from tests.objectives.training.support import Wine

ERRORS = {"error": "minimize", "model_mb": "minimize"}
SEVERAL = {"macro_f1": "maximize", "latency_ms": "minimize"}


def test_the_first_metric_selects_the_best_epoch():
    class Several(Wine):
        directions = SEVERAL

    class Inherited(Several):
        epochs = 3

    class Errors(LoopObjective):
        directions = ERRORS

    assert (Several.metric, Several.direction) == (Inherited.metric, Inherited.direction) == ("macro_f1", "maximize")
    assert (Errors.metric, Errors.direction) == ("error", "minimize")
    assert (Wine.directions, Wine.constraints, Wine.reported) == ({}, {}, ())


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        (
            {"metric": "accuracy", "directions": SEVERAL},
            "Several.metric is 'accuracy', but the first entry of directions is 'mac",
        ),
        (
            {"direction": "minimize", "directions": SEVERAL},
            "Several.direction is 'minimize', but the first entry of directions is",
        ),
        (
            {"directions": {"accuracy": "max"}},
            "Several.directions['accuracy'] must be 'maximize' or 'minimize', not",
        ),
        ({"directions": ["accuracy"]}, "Several.directions must be a dict such as {'accuracy': 'maximize'}"),
        (
            {"directions": {1: "maximize"}},
            "Several.directions must be a dict such as {'accuracy': 'maximize'}",
        ),
    ],
)
def test_invalid_directions_are_rejected_in_the_class_definition(attributes, said):
    with pytest.raises(ObjectiveError) as error:
        type("Several", (Wine,), attributes)
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("constraints", ["['model_mb']", "{'model_mb': 10}"])
def test_invalid_constraints_are_rejected_at_load(tmp_path, constraints):
    file = tmp_path / "several.py"
    file.write_text(
        "from tests.objectives.training.support import Wine\n\n\n"
        f"class Several(Wine):\n    constraints = {constraints}\n"
    )
    with pytest.raises(ObjectiveError, match=r"Several\.constraints"):
        load_objective(str(file))


def test_a_function_has_metrics_and_directions_as_attributes(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(
        "def main(trial):\n    pass\n\n\n"
        "main.directions = {'score': 'maximize', 'model_mb': 'minimize'}\nmain.constraints = {'model_mb': '<= 10'}\n"
    )
    found = load_objective(f"{file}:main")
    assert (found.metric, found.direction) == ("score", "maximize")
    assert found.constraints == {"model_mb": "<= 10"}


def test_requested_metrics_are_stored_once_without_the_objective_metric(wine):
    wine.set_reported_metrics(["accuracy", "latency_ms", "macro_f1", "latency_ms", "loss"])
    assert wine.reported == ("latency_ms", "macro_f1", "loss")
    assert Wine.reported == ()


@pytest.mark.parametrize(
    ("name", "near"), [("macro_f2", "'macro_f1'"), ("latency", "'latency_ms'"), ("rmse", "accuracy, "), ("auroc", "")]
)
def test_a_metric_that_no_built_in_set_has_is_rejected_at_once(wine, name, near):
    with pytest.raises(MetricError) as error:
        wine.set_reported_metrics([name])
    assert f"metric {name!r} is not reported with metric 'accuracy'; " in str(error.value)
    assert near in str(error.value)
    assert "\n" not in str(error.value)


def test_metrics_that_cannot_be_checked_yet_are_accepted(objective_with):
    own = objective_with(metrics=lambda self, train: None)
    own.set_reported_metrics(["whatever"])
    measuring = objective_with(model_metrics=lambda self, model, config: {})
    measuring.set_reported_metrics(["sparsity"])
    assert (own.reported, measuring.reported) == (("whatever",), ("sparsity",))


@pytest.mark.parametrize("name", MODEL_METRICS)
def test_a_model_metric_cannot_select_the_best_epoch(wine, name):
    with pytest.raises(MetricError, match="cannot select the best epoch"):
        wine.set_metric(name, "minimize")


def test_the_value_of_a_metric_in_a_record():
    record = {"val_accuracy": 0.5, "latency_ms": 3.0, "parameters": 1.0, "val_parameters": 2.0}
    assert [get_metric_value(record, name) for name in ("accuracy", "latency_ms", "parameters")] == [0.5, 3.0, 2.0]
    with pytest.raises(KeyError, match=r"^'model_mb'$"):
        get_metric_value(record, "model_mb")
