"""A cross-validated search, from the first command to the served ensemble and the refit."""

from __future__ import annotations

import re
from statistics import fmean

import mlflow
import pytest
import torch

from hpsearch.objectives.builtin.breast_cancer import BreastCancer
from hpsearch.objectives.training.loop.prepare import prepare_folds
from tests.e2e.support import Cli

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("search"), pytest.mark.soak]


def test_all_commands_agree_on_the_mean_of_the_folds(cli: Cli) -> None:
    name, model = "folds", "folds-model"
    said = cli("run", "breast_cancer", "--folds", "3", "--trials", "3", "--epochs", "2", "--name", name)
    assert "of breast_cancer with 3 folds each, 2 workers" in said
    assert re.search(r"best: trial \d, val auroc 0\.\d+ \(mean of 3 folds, standard error 0\.\d+\)", said)
    cli("finalists", name, "--top", "2", "--seeds", "2")
    tested = re.search(r"test set: auroc (\S+), .* for trial (\d+)", cli("evaluate-test", name, "--yes"))
    assert tested is not None
    trial = cli.study(name).trials[int(tested[2])]
    cli("promote", name, "--model", model)
    served = cli("serve-check", f"{model}@champion")
    assert re.findall(r"score +val auroc (\S+)", served) == [f"{trial.value:.9g}"] * 2
    assert "outputs of the exported model reproduced in a process without the code" in served

    mlflow.set_tracking_uri(cli.stack.tracking_uri)
    run = mlflow.MlflowClient().get_run(trial.user_attrs["hpsearch:mlflow_run_id"])
    assert run.data.metrics["best_val_auroc"] == trial.value
    history = mlflow.MlflowClient().get_metric_history
    curves = [
        {point.step: point.value for point in history(run.info.run_id, f"val_auroc_fold_{number}")}
        for number in (1, 2, 3)
    ]
    assert {step: fmean(curve[step] for curve in curves) for step in curves[0]} == trial.intermediate_values
    loaded = mlflow.pyfunc.load_model(f"models:/{model}@champion")
    folds, _ = prepare_folds(BreastCancer(), 0, 3)
    logits = torch.as_tensor(loaded.predict(folds[0].test.x.numpy())).flatten()
    labels = folds[0].test.y.flatten().bool()
    pairs = logits[labels][:, None] - logits[~labels][None]
    auroc = float((pairs > 0).double().mean() + (pairs == 0).double().mean() / 2)
    assert auroc == pytest.approx(float(tested[1]), abs=1e-4)

    assert "are now" not in cli("promote", name, "--model", model, "--refit")
    served = cli("serve-check", f"{model}@champion")
    assert "(of a refit, on samples that it was trained on)" in served
    assert "score reproduced in a process without the code" in served
    assert cli.study(f"{name}.refit").user_attrs["hpsearch:spec"]["folds"] is None
