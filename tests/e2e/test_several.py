"""From an objective with several metrics to a model that programs load by name, with the command line only."""

from __future__ import annotations

import json
import re
from pathlib import Path

import mlflow
import pytest
from optuna.study import StudyDirection
from optuna.trial import TrialState

from tests.e2e.support import Cli

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("search")]

OBJECTIVE = """
from sklearn.datasets import load_wine
from torch import nn

from hpsearch import Objective, Splits, Standardize, TrainConfig


class Small(Objective):
    directions = {"accuracy": "maximize", "parameters": "minimize"}

    def suggest(self, trial):
        self.width = trial.suggest_categorical("width", [1, 32])
        width = trial.suggest_categorical("width", [1, 32])
        return TrainConfig(lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True), model={"width": width})

    def data(self, seed):
        return Splits.make(*load_wine(return_X_y=True), seed=seed)

    def model(self, config, train):
        width = config.model["width"]
        return nn.Sequential(Standardize.fit(train.x), nn.Linear(13, width), nn.ReLU(), nn.Linear(width, 3))
"""

NAME = "several"
STEPS = {
    "loading the objective",
    "opening the study; a new one first checks the objective, and loads its data",
}  # the output of a run before its error
ONE = 13 + 1 + 3 + 3  # parameters of width 1


@pytest.mark.soak
def test_a_multi_objective_study_from_run_to_promotion(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "small.py"
    path.write_text(OBJECTIVE)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"width": 1, "lr": 0.05}\n{"width": 32, "lr": 0.05}\n')
    budget = ("--trials", "8", "--epochs", "3", "--workers", "2", "--enqueue", str(rows))
    said = cli("run", str(path), "--name", NAME, *budget)
    study = cli.study(NAME)
    assert study.directions == [StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE]
    assert [trial.number for trial in study.trials] == list(range(8))
    assert {trial.state for trial in study.trials} <= {TrialState.COMPLETE, TrialState.PRUNED}
    front = sorted(study.best_trials, key=lambda trial: (-trial.values[0], trial.number))
    assert {trial.values[1] for trial in front} == {ONE, 13 * 32 + 32 + 32 * 3 + 3}, "one of each size is best"
    for text in (said, cli("show", NAME)):
        assert f"Pareto front: {len(front)} trials" in text
        for trial in front:
            assert re.search(rf"^ +{trial.number} +{trial.values[0]:.6g} +{trial.values[1]:.6g}$", text, re.MULTILINE)

    output = cli("finalists", NAME, "--seeds", "1")
    report = cli.stack.home / "reports" / f"{NAME}.html"
    assert "retrained" in output
    assert f"report:        {report}\n" in output
    assert "<h2>Finalists</h2>" in report.read_text()
    assert re.search("^(Pareto front on 1 new split|winner: trial)", output, re.MULTILINE), output
    refused = cli("promote", NAME, code=2)
    assert re.fullmatch(
        rf"hpsearch: the Pareto front of study '{NAME}' has \d trials \([\d, ]+\); choose one with --trial, or with a "
        r"preference such as --prefer parameters\n",
        refused,
    )
    promoted = cli("promote", NAME, "--prefer", "accuracy >= 0.1 then parameters")
    number = int(re.match(rf"trial (\d+) of {NAME} is now models:/{NAME}@champion \(version 1\)\n", promoted)[1])  # type: ignore[index]  # else it fails
    assert study.trials[number].values[1] == ONE, "the smallest"
    assert "is marked as unconfirmed: the model was not evaluated on the test set" in promoted
    assert f"report: {report}\n" in promoted
    assert "<h2>Promotions</h2>" in report.read_text()
    opened = cli("evaluate-test", NAME, "--yes")
    assert f"report: {report}\n" in opened
    assert "<h2>Test set</h2>" in report.read_text()
    assert re.search(r"^test accuracy 0\.\d+$|^test accuracy 1$", opened, re.MULTILINE)
    assert "unconfirmed" not in opened
    assert re.search(rf"^test set: accuracy .* for trial {number}$", opened, re.MULTILINE)
    client = mlflow.MlflowClient(cli.stack.tracking_uri)
    version = client.get_model_version_by_alias(NAME, "champion")
    assert version.tags["hpsearch.confirmed"] == "true"
    assert number in json.loads(version.tags["hpsearch.finalists"])["front"]
    served = cli("serve-check", f"{NAME}@champion")
    assert "score reproduced in a process without the code of hpsearch and the objective" in served
    values = dict(re.findall(r"^(recorded|recomputed) score +val accuracy (\S+)$", served, re.MULTILINE))
    assert abs(float(values["recorded"]) - study.trials[number].values[0]) < 1e-6

    run = ("run", str(path), "--name")
    for command, words in (
        ((*run, "bad", "--directions", "accuracy=maximize,parameters=maximize"), "give parameters=minimize"),
        ((*run, "bad", "--directions", "accuracy=maximize,latency=minimize"), "--directions 'latency'"),
        (
            (*run, NAME, "--directions", "accuracy=maximize,latency_ms=minimize"),
            "other settings (directions: ",
        ),
        (("promote", NAME, "--prefer", "speed"), "'speed' is not a condition"),
    ):
        *steps, line = cli(*command, code=2).splitlines()
        assert line.startswith("hpsearch: "), line
        assert words in line, line
        assert set(steps) <= STEPS
    assert "bad" not in cli("studies")
