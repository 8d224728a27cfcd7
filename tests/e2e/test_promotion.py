"""From a finished search to a model that programs load by name, with the command line only."""

from __future__ import annotations

import json
import re
from pathlib import Path

import mlflow
import pytest
from optuna.trial import TrialState

from hpsearch import load_objective
from hpsearch.search.promotion.serve_check import serve_check
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.study_storage.storage import open_storage
from tests.e2e.support import Cli, Search
from tests.web import open_url

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("search")]

MODEL = "end-to-end-promoted"


@pytest.fixture(scope="module")
def promoted(cli: Cli, search: Search) -> str:
    """Return the output of `hpsearch promote` for the search."""
    return cli("promote", search.name, "--model", MODEL)


def test_the_best_trial_is_promoted_and_the_study_shows_it(cli: Cli, search: Search, promoted: str) -> None:
    best = search.study.best_trial
    assert promoted.startswith(f"trial {best.number} of {search.name} is now models:/{MODEL}@champion (version 1)\n")
    assert "version 1 is marked as unconfirmed: no finalists were trained" in promoted
    line = rf"trial {best.number} is {MODEL}@champion \(version 1\), by \S+@\S+ on .*, unconfirmed \(no finalists"
    assert re.search(f"promoted: {line}", cli("show", search.name))
    assert f"{MODEL}@champion (trial {best.number})" in cli("studies")
    tags = search.client.get_model_version_by_alias(MODEL, "champion").tags
    assert json.loads(tags["hpsearch.config"])["batch_size"] == best.params["batch_size"]
    assert re.fullmatch("[0-9a-f]{64}", tags["hpsearch.data_sha256"])


@pytest.mark.soak  # the tutorial runs serve-check too, and the next test compares the scores
def test_a_promoted_model_reproduces_its_value_without_hpsearch(cli: Cli, search: Search, promoted: str) -> None:
    said = cli("serve-check", f"{MODEL}@champion")
    values = dict(re.findall(r"^(recorded|recomputed) score +val accuracy (\S+)$", said, re.MULTILINE))
    assert abs(float(values["recorded"]) - search.study.best_value) < 1e-6
    assert abs(float(values["recomputed"]) - search.study.best_value) < 1e-6
    assert "score reproduced in a process without the code of hpsearch and the objective" in said


@pytest.mark.soak
def test_a_model_with_other_weights_is_detected(cli: Cli, search: Search) -> None:
    complete = search.study.get_trials(states=(TrialState.COMPLETE,))
    worst = min(complete, key=lambda trial: trial.value)
    assert worst.value < search.study.best_value
    best_run = search.client.get_run(search.study.best_trial.user_attrs["hpsearch:mlflow_run_id"])
    model_id = best_run.outputs.model_outputs[0].model_id
    search.client.create_registered_model("end-to-end-swapped")
    search.client.create_model_version(
        "end-to-end-swapped",
        f"models:/{model_id}",
        run_id=worst.user_attrs["hpsearch:mlflow_run_id"],
        model_id=model_id,
    )
    storage = open_storage(cli.stack.storage_url, application_name="test")
    check = serve_check(storage, Tracking(cli.stack.tracking_uri), "end-to-end-swapped/1")
    assert (check.trial, check.recorded_value) == (worst.number, worst.value)
    assert check.recomputed_value == search.study.best_value
    assert check.mismatch.startswith("the difference ")


def test_a_pruned_trial_is_not_promoted(cli: Cli, search: Search) -> None:
    pruned = search.study.get_trials(states=(TrialState.PRUNED,))[0].number
    output = cli("promote", search.name, "--trial", str(pruned), code=2)
    assert output.startswith(f"hpsearch: --trial {pruned}: the trial was pruned (median pruner at epoch"), output
    assert output.count("\n") == 1


def test_the_dashboard_shows_the_curves_of_a_trial(cli: Cli, search: Search) -> None:
    trial = search.study.trials[0]
    pages = f"{cli.stack.dashboard_url}"
    with open_url(f"{pages}/api/studies/{search.study._study_id}") as reply:
        listed = {meta["filename"]: meta for meta in json.load(reply)["trials"][0]["artifacts"]}
    assert {"curves.png", "report.md", "config.yaml", "metrics.jsonl"} <= set(listed)
    meta = listed["curves.png"]
    address = f"{pages}/artifacts/{search.study._study_id}/{trial._trial_id}/{meta['artifact_id']}"
    with open_url(address) as reply:
        assert reply.read(8) == b"\x89PNG\r\n\x1a\n"


def test_cleanup_keeps_everything_that_is_still_needed(cli: Cli, search: Search, promoted: str) -> None:
    said = cli("gc", search.name, "--keep-top", "1", input="n\n")
    best = search.study.best_trial.number
    (models,) = [line for line in said.splitlines() if "except those of the best 1" in line]
    assert str(best) not in re.split(r"[ ,]+", models.partition("except those of the best 1")[2])
    assert "freed" not in said, "it was not agreed to"


BRANCHING = """
from sklearn.datasets import load_wine
from torch import nn

from hpsearch import Objective, Splits, TrainConfig


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(13, 3), nn.Linear(13, 3)

    def forward(self, x):
        return self.one(x) if float(x.mean()) > 1e6 else self.two(x)


class Branching(Objective):
    def suggest(self, trial):
        return TrainConfig(lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True))

    def data(self, seed):
        return Splits.make(*load_wine(return_X_y=True), seed=seed)

    def model(self, config, train):
        return Branch()
"""


@pytest.mark.soak
def test_a_model_that_cannot_be_exported_is_stored_as_checkpoint(cli: Cli, search: Search, tmp_path: Path) -> None:
    """It can be promoted, with a remark that it needs its code, and reproduces its score with this code."""
    path = tmp_path / "branching.py"
    path.write_text(BRANCHING)
    few = ("--name", "branching", "--trials", "1", "--epochs", "1", "--workers", "1")
    cli("run", str(path), *few)
    cli("promote", "branching")
    version = search.client.get_model_version_by_alias("branching", "champion")
    assert "The model could not be exported (GuardOnDataDependentSymNode" in version.description
    said = cli("serve-check", "branching@champion")
    recorded, served = re.findall(r"^(?:recorded|recomputed) score +val accuracy (\S+)$", said, re.MULTILINE)
    assert recorded == served
    assert "score reproduced with the objective's code, as the model cannot be exported (GuardOnData" in said


WINE = """
from sklearn.datasets import load_wine
from torch import nn

from tests.web import open_url
from hpsearch import Objective, Splits, Standardize, TrainConfig


class Wine(Objective):
    def suggest(self, trial):
        return TrainConfig(lr=trial.suggest_float("lr", 1e-6, 1e-1, log=True))

    def data(self, seed):
        return Splits.make(*load_wine(return_X_y=True), seed=seed)

    def model(self, config, train):
        return nn.Sequential(Standardize.fit(train.x), nn.Linear(13, 3))
"""


@pytest.mark.soak
def test_promoting_a_trial_without_a_model_builds_one(cli: Cli, search: Search, tmp_path: Path) -> None:
    """It is the complete model of the best epoch, linked to its metrics. Without the checkpoint it is an error."""
    path, rates = tmp_path / "worse.py", tmp_path / "rates.csv"
    path.write_text(WINE)
    rates.write_text("lr\n0.05\n1e-6\n2e-6\n")
    few = ("--trials", "3", "--epochs", "2", "--workers", "1", "--pruner", "none", "--top-models", "1")
    cli("run", str(path), "--name", "worse", "--enqueue", str(rates), *few)
    runs = [trial.user_attrs["hpsearch:mlflow_run_id"] for trial in cli.study("worse").trials]
    value = cli.study("worse").trials[1].value

    def models(trial: int) -> list[str]:
        outputs = search.client.get_run(runs[trial]).outputs
        return [model.model_id for model in (outputs.model_outputs if outputs else [])]

    assert [len(models(trial)) for trial in range(3)] == [1, 0, 0]
    assert "the model was created from the best checkpoint" in cli("promote", "worse", "--trial", "1")
    assert "was created from" not in cli("promote", "worse", "--trial", "1")
    (model,) = models(1)
    assert {m.key: m.value for m in search.client.get_logged_model(model).metrics}["val_accuracy"] == value
    assert len(search.client.get_metric_history(runs[1], "val_accuracy")) == 2, "no point is there twice"
    val = load_objective(str(path)).data(0).val
    served = mlflow.pytorch.load_model("models:/worse@champion")
    assert abs(float((served(val.x).argmax(dim=1) == val.y).double().mean()) - value) < 1e-6
    cli("gc", "worse", "--keep-top", "1", "--yes")
    gone = cli("promote", "worse", "--trial", "2", code=2)
    assert (
        "no model of this trial (hpsearch gc removed its model and its best checkpoint); promote a trial with a model"
        in gone
    )
