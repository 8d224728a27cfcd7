"""A multi-objective study in the Python API."""

from __future__ import annotations

import pandas as pd
import pytest

from hpsearch import Study, list_studies
from hpsearch.storage.study_storage.storage import open_storage
from tests.search.report.support import BOUNDS, TRIALS, study_of, trial


@pytest.fixture
def study(database_url: str) -> Study:
    study_of(open_storage(database_url, application_name="test"), TRIALS, constraints=BOUNDS)
    return Study.open("s", storage_url=database_url)


def test_pareto_front_and_best_trial_by_the_first_metric(study: Study) -> None:
    assert [each.number for each in study.best_trials] == [0, 1]
    assert [each.values for each in study.best_trials] == [[0.9, 4.0], [0.7, 1.0]]
    assert study.best_trial.number == 0
    assert "front: 2 trials" in study._repr_html_()
    assert "latency_ms 4" in study.describe_trial(0)


def test_a_table_has_a_column_for_each_metric(study: Study) -> None:
    frame = study.trials_dataframe()
    assert list(frame.columns) == [
        *("number", "state", "value", "values_accuracy", "values_latency_ms", "params_kind", "params_lr"),
        *("epochs", "duration", "worker", "reason", "out_of_bounds"),
    ]
    pd.testing.assert_series_equal(frame["value"], frame["values_accuracy"], check_names=False)
    assert frame["values_latency_ms"].tolist() == [4.0, 1.0, 4.5, 0.5, 6.0]
    assert frame["out_of_bounds"].tolist() == ["", "", "", "model_mb 12 is not <= 10", "latency_ms 6 is not <= 5"]


def test_list_studies_has_the_size_of_the_pareto_front(study: Study, database_url: str) -> None:
    (row,) = list_studies(storage_url=database_url)
    assert (row.name, row.best_number, row.front) == ("s", 0, 2)
    assert study.name == row.name


def test_the_pareto_front_of_one_metric_is_the_best_trial(database_url: str) -> None:
    trials = [trial(0, (0.9,)), trial(1, (0.7,))]
    study_of(open_storage(database_url, application_name="test"), trials, ways={"accuracy": "maximize"})
    study = Study.open("s", storage_url=database_url)
    assert study.best_trials == [study.best_trial]
    assert "values_accuracy" not in study.trials_dataframe().columns
