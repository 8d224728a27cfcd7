"""A worker trains trials with folds: it stores the values of the folds, and prunes by them."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
from optuna.trial import TrialState

from hpsearch.search.api.study import Study
from hpsearch.storage.attributes import PRUNING, REASON
from hpsearch.storage.embedded.stack import StackInfo
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.study_storage.storage import open_storage
from hpsearch.storage.trials.history import read_fold_values

# They share the MLflow run of a study `s`, so one pytest process runs them.
pytestmark = pytest.mark.xdist_group("several workers")

OBJECTIVE = """
from sklearn.datasets import load_wine
from torch import nn

from hpsearch import Objective, Splits, Standardize, TrainConfig


class Wine(Objective):
    metric, direction, epochs = "loss", "minimize", 4

    def suggest(self, trial):
        lr = trial.suggest_float("lr", 1e-7, 0.1, log=True)
        return TrainConfig(lr=lr, batch_size=16, schedule="constant", warmup_fraction=0.0)

    def data(self, seed):
        x, y = load_wine(return_X_y=True)
        return Splits.make(x, y, seed=seed)

    def model(self, config, train):
        return nn.Sequential(Standardize.fit(train.x), nn.Linear(13, 3))
"""


def test_a_trial_that_is_worse_in_all_folds_is_pruned(database_url: str, stack: StackInfo, tmp_path: Path) -> None:
    (tmp_path / "wine.py").write_text(OBJECTIVE)
    (tmp_path / "rows.csv").write_text("lr\n2e-2\n1e-7\n5e-2\n")
    pruner = {"name": "wilcoxon", "n_warmup_steps": 1}
    study = Study.create(
        spec={"objective": str(tmp_path / "wine.py"), "name": "s", "n_trials": 3, "folds": 5, "pruner": pruner},
        enqueue=tmp_path / "rows.csv",
        storage_url=database_url,
        tracking_uri=stack.tracking_uri,
        home=str(tmp_path / "home"),
    )
    study.run_worker()
    first, worse, better = study.trials
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE, TrialState.PRUNED, TrialState.COMPLETE]
    assert worse.user_attrs[REASON].startswith("wilcoxon pruner at epoch 2 of 4: best loss ")
    assert worse.user_attrs[REASON].endswith("of trial 0, beyond chance on 5 folds (p = 0.031)")
    assert worse.user_attrs[PRUNING]["cutoff"] == first.intermediate_values[1]
    engine = open_storage(database_url, application_name="test").engine
    history = Tracking(stack.tracking_uri).client.get_metric_history
    for trial in (first, worse, better):
        stored = read_fold_values(engine, trial._trial_id)
        assert {epoch: fmean(folds) for epoch, folds in stored.items()} == trial.intermediate_values
        run = trial.user_attrs["hpsearch:mlflow_run_id"]
        assert {p.step: p.value for p in history(run, "val_loss_fold_3")} == {e: stored[e][2] for e in stored}
