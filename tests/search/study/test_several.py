"""Multi-objective studies are created, joined, extended and deleted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.study import StudyDirection

from hpsearch import LoopObjective
from hpsearch.search.errors import SearchError
from hpsearch.search.spec.resolve import check_settings, convert_names_to_tables
from hpsearch.search.spec.spec_file import read_spec_file
from hpsearch.search.study.control import extend_study
from hpsearch.search.study.create import create_or_join
from hpsearch.search.study.enqueue import enqueue, read_rows
from hpsearch.search.study.study import StoredStudy, load_study
from hpsearch.storage.study_storage.storage import open_storage
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome
from tests.factories import WAYS
from tests.storage.trials.support import rows, take

BOTH = [StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE]


class One(LoopObjective):
    metric, direction = "distance", "minimize"

    def suggest(self, trial):
        return {"lr": trial.suggest_float("lr", 0.01, 1.0, log=True)}

    def run(self, trial):
        raise NotImplementedError


class Both(One):
    metric, direction = "accuracy", "maximize"
    directions = WAYS
    constraints = {"model_mb": "<= 10"}  # noqa: RUF012 as users write it


def made(url: str, searched: LoopObjective | None = None, /, **settings: Any) -> tuple[StoredStudy, bool]:
    storage = open_storage(url, application_name="test")
    given = convert_names_to_tables({"name": "s", **settings, "objective": "x.py"})
    check_settings(given)
    return create_or_join(storage, given, searched or Both(), inspect=lambda *_: {})


def refused(url: str, searched: LoopObjective | None = None, /, **settings: Any) -> str:
    with pytest.raises(SearchError) as error:
        made(url, searched, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_metrics_of_the_objective_are_stored_for_plain_optuna(database_url: str) -> None:
    study, created = made(database_url)
    assert created
    assert (study.spec.direction_by_metric, study.spec.metric, study.spec.constraints) == (
        WAYS,
        "accuracy",
        {"model_mb": "<= 10.0"},
    )
    assert study.spec.pruner.name == "asha"
    plain = optuna.load_study(study_name="s", storage=database_url)
    assert plain.directions == BOTH
    assert plain.metric_names == ["accuracy", "latency_ms"]
    assert load_study(study.storage, "s").spec == study.spec


def test_metrics_are_given_as_an_option_or_in_a_file(database_url: str, tmp_path: Path) -> None:
    flag, _ = made(database_url, One(), directions="latency_ms=minimize,accuracy=maximize", constraints="model_mb<=5")
    assert list(flag.spec.direction_by_metric.items()) == [("latency_ms", "minimize"), ("accuracy", "maximize")]
    assert optuna.load_study(study_name="s", storage=database_url).directions == BOTH[::-1]
    path = tmp_path / "search.toml"
    path.write_text(
        'objective = "x.py"\nname = "filed"\n[directions]\naccuracy = "maximize"\nlatency_ms = "minimize"\n'
        '[constraints]\nmodel_mb = "<= 5"\n'
    )
    filed, _ = made(database_url, One(), **read_spec_file(path))
    assert (filed.spec.direction_by_metric, filed.spec.constraints) == (WAYS, {"model_mb": "<= 5.0"})


def test_one_of_several_metrics_can_be_optimized(database_url: str) -> None:
    study, _ = made(database_url, metric="accuracy", direction="maximize")
    assert (study.spec.is_multi_objective, study.spec.metric, study.spec.pruner.name) == (False, "accuracy", "asha")
    assert optuna.load_study(study_name="s", storage=database_url).direction == StudyDirection.MAXIMIZE


@pytest.mark.parametrize(
    "same",
    [
        {},
        {"directions": WAYS},
        {"directions": "accuracy=maximize,latency_ms=minimize"},
        {"metric": "accuracy"},
        {"constraints": "model_mb <= 10"},
        {"directions": WAYS, "metric": "accuracy", "direction": "maximize"},
    ],
)
def test_a_study_is_joined_with_equal_metrics(database_url: str, same: dict[str, Any]) -> None:
    first, _ = made(database_url)
    again, created = made(database_url, **same)
    assert not created
    assert again.spec == first.spec
    assert list(again.spec.direction_by_metric) == list(first.spec.direction_by_metric)


THREE = {**WAYS, "parameters": "minimize"}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            {"directions": {"accuracy": "maximize", "latency_ms": "minimize"}},
            ["directions: accuracy maximize, ", "parameters", "->"],
        ),
        ({"directions": "accuracy=maximize"}, ["directions: accuracy maximize, ", "-> None"]),
        ({"directions": {**WAYS, "model_mb": "minimize"}}, ["directions: accuracy maximize, ", "model_mb minimize"]),
        ({"directions": {**THREE, "latency_ms": "maximize"}}, ["latency_ms maximize"]),
        ({"directions": dict(reversed(THREE.items()))}, ["-> parameters minimize, latency_ms"]),
        (
            {"directions": {"accuracy": "maximize", "parameters": "minimize", "latency_ms": "minimize"}},
            ["directions: accuracy maximize, ", "parameters minimize, latency_ms minimize"],
        ),
        ({"constraints": "accuracy>=0.5"}, ["constraints: ", "-> accuracy >= 0.5"]),
        ({"metric": "latency_ms"}, ["--metric 'latency_ms'", "must be first in --directions"]),
        ({"metric": "loss"}, ["--metric 'loss' is not in --directions accuracy, latency_ms, parameters"]),
        ({"direction": "minimize"}, ["--direction minimize", "remove --direction"]),
    ],
)
def test_other_metrics_are_rejected_in_a_line_that_names_them(
    database_url: str, other: dict[str, Any], words: list[str]
) -> None:
    made(database_url, One(), directions=THREE, constraints="accuracy>=0.5,model_mb<=10")
    said = refused(database_url, One(), **other)
    assert all(word in said for word in words), said


def test_a_single_objective_study_rejects_several_metrics(database_url: str) -> None:
    made(database_url, One())
    said = refused(database_url, One(), directions="distance=minimize,model_mb=minimize")
    assert "directions: None -> distance minimize, model_mb minimize" in said


def test_extend_and_enqueue_keep_the_order_of_metrics(database_url: str, tmp_path: Path) -> None:
    backwards = {"parameters": "minimize", "accuracy": "maximize", "mb": "minimize"}
    study, _ = made(database_url, One(), directions=backwards, n_trials=2)
    extend_study(study, "+3")
    (tmp_path / "rows.csv").write_text("lr\n0.5\n")
    enqueue(study, read_rows(tmp_path / "rows.csv", One()))
    again = load_study(study.storage, "s")
    assert (again.spec.n_trials, list(again.spec.direction_by_metric.items())) == (5, list(backwards.items()))
    assert [trial.system_attrs["fixed_params"] for trial in again.trials()] == [{"lr": 0.5}]
    claims = Claims(study.engine, study.study_id, worker="w")
    claim = take(claims)
    claims.report(claim, 0, 9.0, metrics=[9.0, 0.5, 1.0])
    claims.finish_attempt(claim, Outcome.COMPLETE, value=[9.0, 0.5, 1.0])
    assert [trial.values for trial in again.front()] == [[9.0, 0.5, 1.0]]
    study.storage.delete_study(study.study_id)
    assert rows(study.engine, "SELECT * FROM hpsearch_epoch_values") == []


def test_options_without_a_name_apply_to_the_default_or_the_joined_study(database_url: str) -> None:
    options: dict[str, Any] = {"sampler": {"random_fraction": 0.1}, "pruner": {"min_complete": 2}}
    study, created = made(database_url, **options)
    assert created
    assert study.spec.sampler.model_dump().items() >= {"name": "freeze_thaw", "random_fraction": 0.1}.items()
    assert study.spec.pruner.model_dump().items() >= {"name": "asha", "min_complete": 2}.items()
    assert not made(database_url, **options)[1]
    assert "sampler.random_fraction: 0.1 -> 0.2" in refused(database_url, sampler={"random_fraction": 0.2})
    made(database_url, name="t", sampler="tpe", pruner="none")
    assert not made(database_url, name="t", sampler={"multivariate": True})[1]
    assert "sampler.random_fraction: tpe has no such option" in refused(
        database_url, name="t", sampler={"random_fraction": 0.1}
    )
    assert "freeze_thaw has no such option" in refused(database_url, name="u", sampler={"multivariate": True})


def test_a_pruner_may_name_a_metric_that_the_objective_has(database_url: str) -> None:
    study, _ = made(database_url, pruner={"name": "threshold", "metric": "model_mb", "upper": 1.0})
    assert study.spec.pruner.get_metric_name() == "model_mb"
