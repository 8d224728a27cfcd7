"""Pruning with several metrics or constraints: by Pareto fronts, by a threshold, and of infeasible trials."""

from __future__ import annotations

from typing import Any

import optuna
import pytest

from hpsearch.search.pruners.study_pruner import Decision, StudyPruner, make_rungs
from hpsearch.search.spec.spec import StudySpec
from hpsearch.storage.rungs.fronts import sort_by_front, to_losses
from hpsearch.storage.study_storage.storage import open_storage
from tests.factories import WAYS, refused, spec

HALVING = {"name": "successive_halving", "reduction_factor": 2}


class Search:
    """A study on Postgres whose trials report both metrics."""

    def __init__(self, url: str, made: StudySpec) -> None:
        self.spec = made
        self.storage = open_storage(url, application_name="test")
        self.study = optuna.create_study(
            study_name=made.name, directions=[*made.direction_by_metric.values()], storage=self.storage
        )
        self.judge = StudyPruner(made, self.storage, self.study._study_id)

    def ask(self) -> int:
        """Create a trial and return its number."""
        return int(self.study.ask().number)

    def report(self, number: int, step: int, vector: list[float], **measured: float) -> Decision:
        trial_id = self.storage.get_trial_id_from_study_id_trial_number(self.study._study_id, number)
        self.storage.set_trial_intermediate_value(trial_id, step, vector[0])
        reported = {**dict(zip(self.spec.direction_by_metric, vector, strict=True)), **measured}
        trial = self.storage.get_trial(trial_id)
        return self.judge(trial, trial.intermediate_values, reported=reported, objective_values=vector)


def test_successive_halving_prunes_by_rank_in_pareto_fronts(database_url: str) -> None:
    search = Search(database_url, spec(directions=WAYS, pruner=HALVING))
    vectors = [[0.5, 5.0], [0.4, 6.0], [0.9, 9.0], [0.6, 5.5], [0.3, 1.0], [0.2, 7.0]]
    for number, vector in enumerate(vectors):
        decision = search.report(search.ask(), 1, vector)
        reached = number + 1
        rank = sort_by_front(to_losses(vectors[:reached], (True, False))).index(number) + 1
        best = max(1, reached // 2)
        assert decision.prune == (rank > best), vector
        assert (decision.rung, decision.peers, decision.value) == (0, number, vector[0])
        if decision.prune:
            assert decision.reason == (
                f"successive_halving pruner at epoch 2 of 9: rank {rank} of {reached} by Pareto fronts at rung 0, "
                f"which promotes the best {best}"
            )
    assert not search.report(2, 2, [0.9, 9.0]).prune, "the first of the next rung"


def test_ties_keep_the_earlier_trial_and_decisions_are_repeatable(
    database_url: str,
) -> None:
    search = Search(database_url, spec(directions=WAYS, pruner=HALVING))
    assert not search.report(search.ask(), 1, [0.5, 5.0]).prune
    late = search.ask()
    first = search.report(late, 1, [0.5, 5.0])
    assert first.prune
    trial = search.storage.get_all_trials(1)[late]
    assert search.judge(trial, trial.intermediate_values, objective_values=[0.5, 5.0]) == first


def test_an_unfilled_rung_promotes_no_trial(database_url: str) -> None:
    search = Search(database_url, spec(directions=WAYS, pruner={**HALVING, "bootstrap_count": 2}))
    assert search.report(search.ask(), 1, [0.9, 1.0]).reason.endswith(
        "prunes the first 2 trials (bootstrap_count); this is number 1"
    )
    assert search.report(search.ask(), 1, [0.8, 0.5]).prune
    assert not search.report(search.ask(), 1, [0.95, 0.4]).prune


@pytest.mark.parametrize(
    ("metric", "vector", "model_mb", "said"),
    [
        ("latency_ms", [0.9, 5.5], 1.0, "latency_ms 5.5 is above the threshold 5"),
        ("latency_ms", [0.1, 5.0], 9.0, ""),
        ("model_mb", [0.9, 1.0], 5.25, "model_mb 5.25 is above the threshold 5"),
        (None, [5.5, 1.0], 1.0, "accuracy 5.5 is above the threshold 5"),
        (None, [0.5, 9.0], 9.0, ""),
    ],
)
def test_a_threshold_applies_to_the_named_metric(
    database_url: str, metric: str | None, vector: list[float], model_mb: float, said: str
) -> None:
    named = {} if metric is None else {"metric": metric}
    pruner = {"name": "threshold", "upper": 5, **named}
    search = Search(database_url, spec(directions=WAYS, constraints="model_mb<=10", pruner=pruner))
    decision = search.report(search.ask(), 0, vector, model_mb=model_mb)
    assert decision.prune == bool(said)
    assert decision.reason == (f"threshold pruner at epoch 1 of 9: {said}" if said else "")


def test_a_threshold_must_name_a_reported_metric() -> None:
    pruner = {"name": "threshold", "upper": 5, "metric": "latency_ms"}
    assert "pruner.metric 'latency_ms' is not a metric of the study (accuracy)" in refused(
        metric="accuracy", direction="maximize", pruner=pruner
    )
    made = spec(metric="accuracy", direction="maximize", constraints="latency_ms<=9", pruner=pruner)
    assert made.pruner.get_metric_name() == "latency_ms"


ONE = {"metric": "accuracy", "direction": "maximize"}
OUT = "out of bounds: parameters 200 is not <= 100; training cannot change this"


@pytest.mark.parametrize("metrics", [{"directions": WAYS}, ONE], ids=["several", "one"])
@pytest.mark.parametrize("pruner", ["asha", "successive_halving", "none"])
def test_a_violated_constant_constraint_prunes_after_one_epoch(
    database_url: str, metrics: dict[str, Any], pruner: str
) -> None:
    bounds = "parameters<=100,accuracy>=0.9,peak_memory_mb<=5"
    search = Search(database_url, spec(**metrics, constraints=bounds, pruner={"name": pruner}))
    vector = [0.5, 5.0][: len(search.spec.direction_by_metric)]
    within = search.report(search.ask(), 0, vector, parameters=100.0, peak_memory_mb=9.0)
    assert not within.prune, "accuracy may rise, and memory is not settled after an epoch"
    decision = search.report(search.ask(), 0, vector, parameters=200.0, peak_memory_mb=1.0)
    assert decision.prune == (pruner != "none")
    assert decision.reason == ("" if pruner == "none" else f"{pruner} pruner at epoch 1 of 9: {OUT}")


def test_rungs_use_the_direction_of_each_metric() -> None:
    rungs = make_rungs(spec(directions=WAYS, pruner={"name": "asha", "min_complete": 2}))
    assert rungs is not None
    assert (rungs.maximize_each, rungs.epochs, rungs.min_complete) == ((True, False), (1, 3), 2)
    one = make_rungs(spec(**ONE, pruner={"name": "asha"}))
    assert one is not None
    assert one.maximize_each == ()
