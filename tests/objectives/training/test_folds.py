"""Cross-validation: one model per fold, which are trained, saved and resumed together."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import numpy as np
import pytest
import torch
from sklearn.datasets import load_wine
from torch import nn

from hpsearch import LocalSession, Splits, Standardize, TrainConfig
from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.fit import fit, restore_model
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.evaluation.step import Step
from hpsearch.objectives.training.fold_metrics import merge_metrics, score_folds, select_fold_metrics
from hpsearch.objectives.training.reproducibility import checkpoint
from tests.objectives.training.support import DiedError, Dying, Memory, StoppedWithin, Wine, raise_died, same_result

FOLDS, EPOCHS = 3, 3
PLAN = RunPlan(EPOCHS, 0, 0, folds=FOLDS)
CONFIG = TrainConfig(lr=0.02, batch_size=32, ema_decay=0.9, schedule="plateau")
STEPS = 2  # of a fold in an epoch: 94 or 95 samples in batches of 32, without the rest


class Noisy(Wine):
    """Dropout draws from the random generators at each step."""

    def model(self, config, train):
        net = nn.Sequential(nn.Linear(13, 16), nn.Dropout(0.3), nn.Linear(16, 3))
        return nn.Sequential(Standardize.fit(train.x), net)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory):
    return fit(Noisy(), CONFIG, PLAN, run_dir=tmp_path_factory.mktemp("undisturbed"), device="cpu")


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(after, marks=[] if FOLDS * STEPS - 1 <= after <= FOLDS * STEPS else pytest.mark.soak)
        for after in range(1, 2 * FOLDS * STEPS)
    ],
)
def test_a_run_that_is_stopped_within_any_fold_resumes_exactly(tmp_path, undisturbed, after) -> None:
    first = fit(Noisy(), CONFIG, PLAN, session=StoppedWithin(tmp_path, after), device="cpu")
    assert (first.status, len(first.history)) == ("stopped", (after - 1) // (FOLDS * STEPS))
    session = StoppedWithin(tmp_path, 0)
    resumed = fit(Noisy(), CONFIG, PLAN, session=session, device="cpu")
    assert session.steps == EPOCHS * FOLDS * STEPS - after
    same_result(resumed, undisturbed)


@pytest.mark.parametrize("point", ["unsaved", "unreported", "reported"])
def test_a_run_that_is_killed_resumes_exactly(tmp_path, undisturbed, point) -> None:
    with pytest.raises(DiedError):
        fit(Noisy(), CONFIG, PLAN, session=Dying(tmp_path, 1, point, raise_died), device="cpu")
    same_result(fit(Noisy(), CONFIG, PLAN, session=LocalSession(tmp_path), device="cpu"), undisturbed)


def test_a_run_reports_the_means_the_standard_error_and_each_fold(undisturbed) -> None:
    metrics = undisturbed.history[-1].metrics
    values = [metrics[f"val_accuracy_fold_{number}"] for number in (1, 2, 3)]
    assert metrics["val_accuracy"] == fmean(values)
    assert metrics["val_accuracy_se"] == stdev(values) / math.sqrt(FOLDS)
    report = (undisturbed.best_path.parent / "report.md").read_text()
    assert all(f"| {number} | " in report for number in (1, 2, 3))


def test_the_restored_model_is_the_mean_of_the_folds_and_validates_each_on_its_own_samples(undisturbed) -> None:
    restored = restore_model(Noisy(), checkpoint.read(undisturbed.best_path))
    assert restored.validate()["accuracy"] == pytest.approx(undisturbed.best_value, abs=1e-12)
    x = restored.splits.val.x
    with torch.inference_mode():
        outputs = [model(x) for model in restored.model.models]
        assert torch.equal(restored.model(x), torch.stack(outputs).mean(0))
        assert not torch.equal(outputs[0], outputs[1])
    assert 0.8 < restored.test()["accuracy"] <= 1


def test_the_values_of_the_folds_have_a_standard_error_unless_one_is_not_finite() -> None:
    merged = merge_metrics([{"val_r2": 0.25, "epoch_seconds": 1.0}, {"val_r2": 0.75, "epoch_seconds": 2.0}], "val_r2")
    assert (merged["val_r2"], merged["val_r2_se"], merged["epoch_seconds"]) == (0.5, pytest.approx(0.25), 3.0)
    assert select_fold_metrics(merged, "val_r2", 2) == [0.25, 0.75]
    assert math.isnan(merge_metrics([{"val_r2": math.nan}, {"val_r2": 0.75}], "val_r2")["val_r2_se"])


def test_the_epoch_of_a_fold_is_selected_by_the_other_folds() -> None:
    curves = [[0.5, 0.9, 0.6], [0.5, 0.6, 0.8], [0.5, 0.6, 0.9]]
    found = score_folds(curves, maximize=True, sizes=(2, 3, 1))
    assert found.epochs == (2, 1, 1)  # the others' sums: 1.0 1.2 1.7, 1.0 1.5 1.5, 1.0 1.5 1.4
    assert found.value == pytest.approx(fmean([0.6, 0.6, 0.6]))
    assert found.value + found.optimism == pytest.approx(fmean([0.6, 0.8, 0.9]))
    mirrored = score_folds([[-value for value in curve] for curve in curves], maximize=False, sizes=(2, 3, 1))
    assert (mirrored.value, mirrored.epochs) == (-found.value, found.epochs)


def test_a_run_on_a_new_division_has_a_score_and_the_same_test_samples() -> None:
    plan = RunPlan(EPOCHS, 0, 0, resplit_seed=5, folds=FOLDS)
    found = fit(Wine(), CONFIG, plan, device="cpu")
    assert found.resplit_score.sizes == (94, 142, 36)
    assert found.resplit_score.error > 0
    assert found.resplit_score.has_new_split


def test_the_windows_of_folds_by_time_are_no_new_division() -> None:
    class Timed(Wine):
        def data(self, seed):
            x, y = load_wine(return_X_y=True)
            shuffled = np.random.default_rng(0).permutation(len(x))
            return Splits.make(x[shuffled], y[shuffled], seed=seed, times=np.arange(len(x)))

    found = fit(Timed(), CONFIG, RunPlan(2, 0, 0, resplit_seed=5, folds=FOLDS), device="cpu")
    assert not found.resplit_score.has_new_split


class Stepping(Wine):
    def step(self, model, batch, config):
        return Step(model(batch.x).sum())


@pytest.mark.parametrize(
    ("objective", "plan", "said"),
    [
        (Stepping(), PLAN, "--folds is not available for Stepping, because its step()"),
        (Wine(), RunPlan(EPOCHS, 0, 0, folds=60), "--folds 60 needs at least 60 samples of the rarest class"),
    ],
)
def test_what_cannot_be_divided_is_an_error(objective, plan, said) -> None:
    with pytest.raises(ObjectiveError) as raised:
        fit(objective, CONFIG, plan, device="cpu")
    assert said in str(raised.value)


@pytest.mark.parametrize("plan", [{"folds": 1}, {"folds": 3, "refit": 2}, {"fold": 0}, {"folds": 2, "fold": 2}])
def test_a_plan_that_contradicts_itself_is_an_error(plan) -> None:
    with pytest.raises(ObjectiveError, match="fold"):
        RunPlan(3, 0, 0, **plan)


def test_a_checkpoint_of_other_folds_is_an_error(tmp_path, undisturbed) -> None:
    for path in undisturbed.best_path.parent.glob("*.pt"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for plan in (RunPlan(EPOCHS, 0, 0, folds=4), RunPlan(EPOCHS, 0, 0)):
        with pytest.raises(ObjectiveError, match="belongs to another run"):
            fit(Noisy(), CONFIG, plan, session=LocalSession(tmp_path), device="cpu")


def test_the_patience_counts_epochs_of_the_mean() -> None:
    config = TrainConfig(lr=1e-9, batch_size=32, patience=2, warmup_fraction=0.0)
    found = fit(Wine(), config, RunPlan(20, 0, 0, folds=2), session=Memory(), device="cpu")
    assert (found.status, len(found.history)) == ("completed", found.best_epoch + 3)
