"""Multi-objective trials in a worker: required reports and violated constraints."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from hpsearch import EpochRecord
from hpsearch.objectives.training.session import Curve
from hpsearch.search.api.study import Study
from hpsearch.search.study.ranking import find_pareto_front, rank_trials
from hpsearch.search.worker.trial_session import measure_violations
from hpsearch.storage.attributes import INFEASIBLE, PRUNING, REASON, RUN_ID, VIOLATIONS
from hpsearch.storage.embedded.stack import StackInfo
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.trials.history import read_epoch_values, read_progress
from tests.factories import spec

# They share the MLflow run of a study `s`, so one pytest process runs them.
pytestmark = pytest.mark.xdist_group("several workers")

OBJECTIVE = """
from pathlib import Path

import torch

from hpsearch import LoopObjective

KINDS = ["good", "better", "small", "silent", "large", "costly", "nan", "memory", "poor", "poorer", "end"]


class Kinds(LoopObjective):
    epochs = 3
    metric, direction = "score", "maximize"

    def suggest(self, trial):
        return {"kind": trial.suggest_categorical("kind", KINDS)}

    def run(self, trial):
        kind = trial.config["kind"]
        begun = Path(__file__).with_name(f"begun-{kind}")
        if kind == "memory" and begun.exists():
            raise torch.OutOfMemoryError("CUDA out of memory")
        begun.touch()
        if kind == "end":
            raise type("End", (BaseException,), {})("of its own kind")
        for epoch in trial.epochs():
            score = {"better": 0.9, "small": 0.3, "memory": 0.2, "poor": 0.15, "poorer": 0.1}.get(kind, 0.5)
            numbers = {"score": score if epoch != 1 else score + 0.05, "cost": 10.0 - epoch, "parameters": 10.0}
            if kind == "silent" and epoch == 1:
                del numbers["cost"]
            changed = {"large": ("parameters", 200.0), "costly": ("cost", 60.0), "small": ("cost", 1.0)}
            if kind in changed:
                numbers |= [changed[kind]]
            if kind == "nan" and epoch == 1:
                numbers["cost"] = float("nan")
            trial.report(numbers)
"""

SEVERAL = {"directions": {"score": "maximize", "cost": "minimize"}}
BOUNDS = {"constraints": {"parameters": "<= 100", "cost": "<= 50"}}
OUT = "cost 60 is not <= 50"

Ran = Callable[..., Study]


@pytest.fixture
def ran(database_url: str, stack: StackInfo, tmp_path: Path) -> Ran:
    """Runs trials of these kinds to the end of their study, in this process."""
    (tmp_path / "kinds.py").write_text(OBJECTIVE)

    def run(*kinds: str, **settings: Any) -> Study:
        rows = "\n".join(json.dumps({"kind": kind}) for kind in kinds)
        (tmp_path / "rows.jsonl").write_text(rows)
        study = Study.create(
            spec={"objective": str(tmp_path / "kinds.py"), "name": "s", "n_trials": len(kinds), **settings},
            enqueue=tmp_path / "rows.jsonl",
            storage_url=database_url,
            tracking_uri=stack.tracking_uri,
            home=str(tmp_path / "home"),
        )
        study.run_worker()
        return study

    return run


def reason(trial: FrozenTrial) -> str:
    return str(trial.user_attrs[REASON])


def tags(stack: StackInfo, trial: FrozenTrial) -> dict[str, str]:
    return dict(Tracking(stack.tracking_uri).client.get_run(trial.user_attrs[RUN_ID]).data.tags)


def test_outcomes_of_multi_objective_trials(ran: Ran, stack: StackInfo, database_url: str) -> None:
    kinds = ("good", "better", "small", "silent", "large", "costly", "nan", "end")
    study = ran(*kinds, pruner="none", **SEVERAL, **BOUNDS)
    good, better, small, silent, large, costly, nan, end = study.trials
    ends = [trial.state.name for trial in study.trials]
    assert ends == ["COMPLETE", "COMPLETE", "COMPLETE", "FAIL", "COMPLETE", "COMPLETE", "PRUNED", "FAIL"]
    assert re.search(r"Kinds.run: .*kinds.py:\d+: End: of its own kind", reason(end))
    assert good.values == [0.55, 9.0], "those of the epoch that is best by the first metric"
    assert reason(good) == "best score 0.55 at epoch 2"
    assert "metric 'cost' is required by the study but not reported" in reason(silent)
    assert "\n" not in reason(silent)
    assert large.intermediate_values.keys() == {0, 1, 2}, "without a pruner it is trained to its end"
    assert reason(large) == "best score 0.55 at epoch 2; out of bounds: parameters 200 is not <= 100"
    assert reason(costly) == f"best score 0.55 at epoch 2; out of bounds: {OUT}"
    assert (reason(nan), nan.user_attrs[INFEASIBLE], nan.values) == ("cost is nan at epoch 2", True, None)
    assert [trial.user_attrs.get(VIOLATIONS) for trial in (good, large, costly)] == [
        None,
        ["parameters 200 is not <= 100"],
        [OUT],
    ]
    assert costly.constraints == {"parameters": -90.0, "cost": 10.0}
    assert good.constraints == {"parameters": -90.0, "cost": -41.0}
    assert tags(stack, costly)["hpsearch.out_of_bounds"] == OUT
    assert "hpsearch.out_of_bounds" not in tags(stack, good)
    maximize = study.spec.maximize_each
    assert [trial.number for trial in find_pareto_front(study.trials, maximize)] == [1, 2]
    assert {trial.number for trial in rank_trials(study.trials, maximize)} == {0, 1, 2}
    assert {trial.number for trial in rank_trials(study.trials, maximize, infeasible=True)} == {0, 1, 2, 4, 5}
    summary = study.summary()
    assert ([trial.number for trial in summary.front], summary.out_of_bounds) == ([1, 2], 2)
    plain = optuna.load_study(study_name="s", storage=database_url)
    assert sorted(trial.number for trial in plain.best_trials) == [1, 2], "as Optuna has it"
    stored = study._stored
    known = read_epoch_values(stored.engine, stored.study_id)
    assert known[costly._trial_id] == {0: [0.5, 60.0], 1: [0.55, 60.0], 2: [0.5, 60.0]}
    progress = read_progress(stored.engine, stored.study_id, "maximize")
    assert (progress.best_number, progress.best_value, progress.complete) == (1, pytest.approx(0.95), 5)
    parent = Tracking(stack.tracking_uri).client.get_run(stored.attrs[RUN_ID]).data
    front = json.loads(parent.tags["hpsearch.front"])
    assert {int(number): list(values.values()) for number, values in front.items()} == {
        trial.number: trial.values for trial in (better, small)
    }
    assert parent.tags["hpsearch.out_of_bounds"] == "2"


def test_constant_metrics_are_known_after_one_epoch(ran: Ran) -> None:
    study = ran("large", "costly", "good", pruner={"name": "asha", "min_resource": 2}, **SEVERAL, **BOUNDS)
    large, costly, good = study.trials
    assert large.state == TrialState.PRUNED
    assert reason(large) == (
        "asha pruner at epoch 1 of 3: out of bounds: parameters 200 is not <= 100; training cannot change this"
    )
    assert large.intermediate_values.keys() == {0}
    assert large.values == [0.5, 10.0]
    assert large.user_attrs[PRUNING]["epoch"] == 0
    assert large.constraints["parameters"] == 100.0
    assert costly.intermediate_values.keys() == {0, 1, 2}, "three are trained to the end"
    assert (good.state, good.values) == (TrialState.COMPLETE, [0.55, 9.0])


def test_one_metric_with_constraints(ran: Ran) -> None:
    study = ran("costly", "small", "large", pruner="none", **BOUNDS)
    costly, small, large = study.trials
    assert [trial.values for trial in study.trials] == [[0.55], [pytest.approx(0.35)], [0.55]]
    assert reason(costly).endswith(f"; out of bounds: {OUT}")
    assert costly.constraints == {"parameters": -90.0, "cost": 10.0}
    assert large.user_attrs[VIOLATIONS] == ["parameters 200 is not <= 100"]
    assert [trial.number for trial in rank_trials(study.trials, (True,))] == [small.number]
    stored, summary = study._stored, study.summary()
    assert (summary.best, summary.out_of_bounds) == (small, 2), "though others are better"
    assert read_progress(stored.engine, stored.study_id, "maximize").best_number == small.number
    assert read_epoch_values(stored.engine, stored.study_id) == {}, "one value an epoch is Optuna's"


def test_a_retrained_trial_that_violates_a_constraint_is_infeasible(ran: Ran, tmp_path: Path) -> None:
    """It waited in vain, and its checkpoint is gone: what it reported is known to the database alone."""
    asha = {"name": "asha", "min_resource": 1, "reduction_factor": 2, "min_complete": 1}
    study = ran("memory", "good", pruner=asha, **SEVERAL)
    assert [trial.state.name for trial in study.trials] == ["PRUNED", "COMPLETE"]
    assert study.trials[0].values == [0.2, 10.0]
    study.extend("+2")
    (tmp_path / "rows.jsonl").write_text('{"kind": "poor"}\n{"kind": "poorer"}\n')
    assert study.enqueue_trial(tmp_path / "rows.jsonl") == 2
    study.run_worker()
    memory, *others = study.trials
    assert (memory.state, memory.user_attrs[INFEASIBLE]) == (TrialState.PRUNED, True)
    assert reason(memory).startswith("out of memory on cpu")
    assert memory.intermediate_values == {0: 0.2}
    assert [trial.state.name for trial in others] == ["COMPLETE", "PRUNED", "PRUNED"]


def test_a_study_requests_optimized_and_constrained_metrics() -> None:
    asked = spec(directions={"accuracy": "maximize", "latency_ms": "minimize"}, constraints="model_mb<=10")
    found = asked.select_metrics({"val_accuracy": 0.5, "latency_ms": 3.0, "model_mb": 12.0, "val_loss": 0.1, "lr": 0.1})
    assert found == {"accuracy": 0.5, "latency_ms": 3.0, "model_mb": 12.0}
    assert measure_violations(asked, found) == {"constraints:model_mb": 2.0}
    with pytest.raises(KeyError, match="latency_ms"):
        asked.select_metrics({"val_accuracy": 0.5, "val_latency": 3.0, "train_loss": 1.0, "model_mb": 1.0})


def test_the_earliest_of_equal_epochs_is_the_best() -> None:
    curve = Curve("accuracy", maximize=True, known={0: 0.4, 5: 0.9})
    kept = [
        curve.add(EpochRecord(epoch, 0.0, {"val_accuracy": value}), dict) for epoch, value in enumerate((0.5, 0.7, 0.7))
    ]
    assert kept == [True, True, False]
    assert [curve.find_best_up_to(epoch).epoch for epoch in range(3)] == [0, 1, 1]
    assert curve.values == {0: 0.4, 1: 0.7, 2: 0.7, 5: 0.9}, "what was reported before stays"
