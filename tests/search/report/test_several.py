"""The output of commands for a multi-objective study, in 80 columns and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from rich.console import Console

from hpsearch.search.report.show import forecast_trials, print_study
from hpsearch.search.report.show_trial import print_trial
from hpsearch.search.report.top import read_status, render_status
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.study_storage.storage import open_storage
from tests.search.report.support import BOUNDS, TRIALS, study_of, trial

Shown = Callable[[Console], object]


def lines_of(show: Shown) -> list[str]:
    console = Console(width=80, markup=False, highlight=False, emoji=False)
    with console.capture() as text:
        show(console)
    return text.get().splitlines()


@pytest.fixture
def study(database_url: str) -> StoredStudy:
    return study_of(open_storage(database_url, application_name="test"), TRIALS, constraints=BOUNDS)


def test_the_table_has_a_column_for_each_metric(study: StoredStudy) -> None:
    lines = lines_of(lambda console: print_study(console, study, None, every=True))
    assert "   directions  accuracy=maximize, latency_ms=minimize" in lines
    assert "  constraints  latency_ms <= 5, model_mb <= 10" in lines
    assert not any(line.split()[:1] in (["metric"], ["direction"]) for line in lines)
    [head] = [line for line in lines if line.startswith("trial ")]
    assert head.split() == ["trial", "state", "epochs", "accuracy", "latency_ms", "lr", "reason"]
    assert lines[lines.index(head) + 1].split() == ["0", "complete", "2", "0.9", "4", "0.001"]
    assert next(line for line in lines if line.startswith("    3  ")).rstrip().endswith("model_mb 12 is not <= 10")
    assert "Pareto front: 2 trials" in lines


def test_a_trial_has_its_values_by_epoch_and_its_violated_constraints(study: StoredStudy) -> None:
    lines = [line.split() for line in lines_of(lambda console: print_trial(console, study, 4))]
    assert ["values", "accuracy", "0.5,", "latency_ms", "6", "(last", "epoch)"] in lines
    assert ["bounds", "violated:", "latency_ms", "6", "is", "not", "<=", "5"] in lines
    at = lines.index(["epoch", "accuracy", "latency_ms"])
    assert lines[at + 1 : at + 3] == [["1", "0.25", "12"], ["2", "0.5", "6"]]


def test_top_prints_the_pareto_front_also_as_json(study: StoredStudy) -> None:
    standing = read_status(study)
    shown = " ".join(" ".join(lines_of(lambda console: console.print(render_status(standing, None)))).split())
    assert "best accuracy 0.9 (trial 0), 2 on the Pareto front" in shown
    data = json.loads(standing.to_json())
    assert data["directions"] == {"accuracy": "maximize", "latency_ms": "minimize"}
    assert data["front"][1] == {"trial": 1, "values": {"accuracy": 0.7, "latency_ms": 1.0}}


def test_the_json_of_a_single_objective_study_is_unchanged(database_url: str) -> None:
    storage = open_storage(database_url, application_name="test")
    data = json.loads(read_status(study_of(storage, [trial(0, (0.9,))], ways={"accuracy": "maximize"})).to_json())
    assert not {"directions", "front"} & set(data)


def test_no_forecast_for_several_metrics(study: StoredStudy) -> None:
    assert forecast_trials(study, study.trials()) == {}
