"""Directions and constraints: valid and invalid settings."""

from __future__ import annotations

from typing import Any

import pytest

from hpsearch.search.spec.multi_objective import Bound
from hpsearch.search.spec.spec import parse_spec
from tests.factories import WAYS, refused, spec


@pytest.mark.parametrize(
    "given", [WAYS, "accuracy=maximize,latency_ms=minimize", "accuracy = maximize , latency_ms=minimize,"]
)
def test_the_first_of_several_metrics_is_the_main_one(given: Any) -> None:
    made = spec(directions=given)
    assert (made.metric, made.direction, made.direction_by_metric) == ("accuracy", "maximize", WAYS)
    assert made.is_multi_objective
    assert made.maximize_each == (True, False)
    assert made.reported_metrics == ("latency_ms",)
    assert (made.sampler.name, made.pruner.name) == ("freeze_thaw", "asha")


def test_a_stored_spec_keeps_the_order_of_its_metrics() -> None:
    made = spec(directions={"zeta": "minimize", "alpha": "maximize"})
    assert list(parse_spec(made.model_dump()).direction_by_metric) == ["zeta", "alpha"]


def test_one_direction_means_one_metric() -> None:
    made = spec(directions={"loss": "minimize"})
    assert (made.metric, made.direction, made.directions, made.is_multi_objective) == ("loss", "minimize", None, False)
    assert (made.sampler.name, made.pruner.name) == ("freeze_thaw", "asha")


def test_options_without_a_name_apply_to_the_default() -> None:
    options: Any = {"sampler": {"n_startup_trials": 5}, "pruner": {"min_resource": 3}}
    made = spec(directions=WAYS, **options)
    assert made.sampler.model_dump().items() >= {"name": "freeze_thaw", "n_startup_trials": 5}.items()
    assert made.pruner.model_dump().items() >= {"name": "asha", "min_resource": 3}.items()
    short = {"directions": {"loss": "minimize"}, "epochs": 3}
    made = spec(**short, sampler=options["sampler"], pruner={"n_warmup_steps": 3})
    assert made.sampler.model_dump().items() >= {"name": "tpe", "n_startup_trials": 5}.items()
    assert made.pruner.model_dump().items() >= {"name": "median", "n_warmup_steps": 3}.items()
    other = spec(directions=WAYS, sampler={"name": "tpe"}, pruner={"name": "none"})
    assert (other.sampler.name, other.pruner.name) == ("tpe", "none")


@pytest.mark.parametrize("given", [{"model_mb": "<= 10", "accuracy": ">=0.9"}, "model_mb<=10, accuracy >= 0.9"])
def test_constraints_are_parsed(given: Any) -> None:
    made = spec(metric="accuracy", direction="maximize", constraints=given)
    assert made.constraint_bounds == (Bound("model_mb", "<=", 10.0), Bound("accuracy", ">=", 0.9))
    assert made.reported_metrics == ("model_mb",)
    assert made.list_violations({"model_mb": 10.0, "accuracy": 0.9}) == []
    broken = ["model_mb 12.5 is not <= 10", "accuracy 0.8 is not >= 0.9"]
    assert made.list_violations({"model_mb": 12.5, "accuracy": 0.8}) == broken
    assert [round(bound.violation(12.5), 6) for bound in made.constraint_bounds] == [2.5, -11.6]
    assert parse_spec(made.model_dump()) == made


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"directions": "accuracy=maximize,accuracy=minimize"}, "names accuracy twice"),
        ({"directions": "accuracy"}, "METRIC=maximize"),
        ({"directions": "accuracy=up,loss=minimize"}, "accuracy=up"),
        ({"directions": ["accuracy"]}, "give a table"),
        ({"directions": {"": "maximize", "loss": "minimize"}}, "is not the name of a metric"),
        ({"directions": {"loss": "minimize", " loss ": "maximize"}}, "--directions names loss twice"),
        ({"directions": WAYS, "constraints": {"mb": "<= 1", "mb ": ">= 5"}}, "--constraints names mb twice"),
        ({"directions": WAYS, "metric": "loss"}, "--metric 'loss' is not in --directions"),
        ({"directions": WAYS, "metric": "latency_ms"}, "must be first in --directions"),
        ({"directions": WAYS, "direction": "minimize"}, "remove --direction"),
        ({"directions": WAYS, "pruner": {"name": "median"}}, "--pruner median supports a single metric"),
        ({"directions": WAYS, "pruner": {"name": "hyperband"}}, "--pruner hyperband supports a single metric"),
        (
            {"directions": WAYS, "pruner": {"name": "wilcoxon"}, "folds": 5},
            "--pruner wilcoxon supports a single metric",
        ),
        ({"directions": WAYS, "sampler": {"name": "cmaes"}}, "--sampler cmaes supports a single metric"),
        ({"directions": WAYS, "min_expected_gain": 0.1}, "--min-expected-gain"),
        ({"directions": WAYS, "sampler": {"name": "freeze_thaw"}, "warm_start": "other"}, "--warm-start"),
        (
            {"directions": WAYS, "pruner": {"name": "threshold", "metric": "model_mb", "upper": 1}},
            "pruner.metric 'model_mb'",
        ),
        ({"directions": WAYS, "constraints": "model_mb"}, "METRIC<=NUMBER"),
        ({"directions": WAYS, "constraints": "model_mb<10"}, "is not a bound"),
        ({"directions": WAYS, "constraints": {"model_mb": "<= ten"}}, "'<= ten' is not a bound"),
        ({"directions": WAYS, "constraints": {"model_mb": "<= nan"}}, "is not a bound"),
        ({"directions": WAYS, "constraints": "model_mb<=1,model_mb>=0"}, "names model_mb twice"),
        ({"directions": WAYS, "constraints": 5}, "give a table"),
    ],
)
def test_invalid_metrics_and_constraints_are_errors_of_one_line(settings: dict[str, Any], named: str) -> None:
    assert named in refused(**settings)
