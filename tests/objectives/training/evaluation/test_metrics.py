import numpy as np
import pytest
import torch
from sklearn import metrics as reference
from torch import nn

from hpsearch import Dataset, ObjectiveError, evaluate
from hpsearch.objectives.errors import MetricError
from hpsearch.objectives.training.evaluation.metrics import (
    binary,
    build_metrics,
    classification,
    list_compatible_metrics,
    regression,
)


def _over_batches(metrics, output, target, size=7):
    metrics.reset()
    for start in range(0, len(output), size):
        metrics.update(output[start : start + size], target[start : start + size])
    return {name: float(value) for name, value in metrics.compute().items()}


def test_classification_agrees_with_scikit_learn():
    torch.manual_seed(0)
    logits, y = torch.randn(100, 4), torch.randint(0, 4, (100,))
    found = _over_batches(classification(4), logits, y)
    guess = logits.argmax(1)
    assert found["accuracy"] == pytest.approx(reference.accuracy_score(y, guess))
    assert found["macro_f1"] == pytest.approx(reference.f1_score(y, guess, average="macro"))


@pytest.mark.parametrize("scale", [0.2, 3.0, 20.0])
def test_binary_agrees_with_scikit_learn_whatever_the_range_of_the_logits(scale):
    torch.manual_seed(1)
    y = (torch.rand(200) < 0.3).long()
    logits = (torch.rand(200) + 0.4 * y).unsqueeze(1) * scale  # small scales: some batches lie within [0, 1]
    found = _over_batches(binary(), logits, y)
    assert found["auroc"] == pytest.approx(reference.roc_auc_score(y, logits[:, 0]))
    assert found["average_precision"] == pytest.approx(reference.average_precision_score(y, logits[:, 0]))
    assert found["base_rate"] == pytest.approx(float(y.float().mean()))


def test_confident_scores_stay_distinct():
    y = torch.tensor([0, 1] * 5)
    logits = torch.arange(10).float() + 20.0  # a float32 sigmoid gives 1.0 for all of them
    assert _over_batches(binary(), logits, y)["auroc"] == pytest.approx(reference.roc_auc_score(y, logits))


@pytest.mark.parametrize("label", [0, 1])
def test_auroc_over_one_class_is_refused(label):
    with pytest.raises(ObjectiveError, match=f"needs both classes, but all 9 labels of a split are {label}"):
        _over_batches(binary(), torch.randn(9), torch.full((9,), label))


def test_regression_agrees_with_scikit_learn_and_never_broadcasts():
    torch.manual_seed(2)
    y = torch.randn(50)
    guess = (y + 0.3 * torch.randn(50)).unsqueeze(1)
    found = _over_batches(regression(), guess, y)
    assert found["rmse"] == pytest.approx(reference.root_mean_squared_error(y, guess[:, 0]), rel=1e-5)
    assert found["mae"] == pytest.approx(reference.mean_absolute_error(y, guess[:, 0]), rel=1e-5)
    assert found["r2"] == pytest.approx(reference.r2_score(y, guess[:, 0]), rel=1e-5)
    with pytest.raises(ObjectiveError, match="do not match targets"):
        regression().update(torch.zeros(4, 3), torch.zeros(4))


def _labels(values):
    return Dataset(torch.zeros(len(values), 1), torch.as_tensor(values))


def test_the_metric_determines_the_set_of_metrics():
    labels, numbers = _labels([0, 1, 2]), _labels([0.5, 1.0, 2.0])
    assert set(build_metrics("macro_f1", labels)) == {"accuracy", "macro_f1"}
    assert set(_over_batches(build_metrics("loss", numbers), torch.ones(3), torch.rand(3))) == {"rmse", "mae", "r2"}
    with pytest.raises(ObjectiveError, match="metric 'acuracy' is not built in; did you mean 'accuracy'"):
        build_metrics("acuracy", labels)
    wrong = r"'accuracy' is incompatible with targets \[n\] of torch.float32; compatible metrics: rmse, mae, r2, loss"
    with pytest.raises(MetricError, match=wrong):
        build_metrics("accuracy", numbers)


def test_compatible_metrics_follow_from_targets_and_outputs():
    labels, two, numbers = torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1]), torch.rand(3)
    assert list_compatible_metrics(labels, torch.zeros(2, 3)) == ["accuracy", "macro_f1", "loss"]
    assert list_compatible_metrics(two, torch.zeros(2, 2)) == [
        "accuracy",
        "macro_f1",
        "auroc",
        "average_precision",
        "loss",
    ]
    assert list_compatible_metrics(two, torch.zeros(2, 1)) == ["auroc", "average_precision", "loss"]
    assert list_compatible_metrics(two.float(), torch.zeros(2)) == [
        "auroc",
        "average_precision",
        "rmse",
        "mae",
        "r2",
        "loss",
    ]
    assert list_compatible_metrics(numbers, torch.zeros(2, 1)) == ["rmse", "mae", "r2", "loss"]
    assert list_compatible_metrics(torch.tensor([3, 7, 5]), torch.zeros(2, 1)) == ["rmse", "mae", "r2", "loss"], (
        "counts"
    )
    assert list_compatible_metrics(numbers, torch.zeros(2, 3)) == []


class _Score(nn.Module):
    """Returns the input; dropout shows whether it runs in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.9)

    def forward(self, x):
        return self.drop(x)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("batch_size", [1, 3, 64, 1000])
def test_a_loss_is_the_mean_over_samples_for_any_batch_size(reduction, batch_size):
    torch.manual_seed(3)
    x, y = 5 * torch.randn(64 + 3, 4), torch.randint(0, 4, (67,))
    model = _Score().train()
    loss = nn.CrossEntropyLoss(reduction=reduction)
    found = evaluate(model, Dataset(x, y), loss, classification(4), batch_size=batch_size, device="cpu")
    assert found["loss"] == pytest.approx(float(nn.CrossEntropyLoss()(x, y)), rel=1e-6)
    assert found["accuracy"] == pytest.approx(float((x.argmax(1) == y).double().mean()))
    assert model.training, "the mode is put back"


def test_a_metric_must_be_a_scalar():
    class PerClass:
        def update(self, output, target):
            pass

        def compute(self):
            return {"recalls": np.ones(3)}

        def reset(self):
            pass

        def to(self, device):
            return self

    with pytest.raises(ObjectiveError, match=r"metric 'recalls' must be one number, not a tensor \[3\]"):
        evaluate(
            _Score(),
            Dataset(torch.randn(4, 2), torch.zeros(4).long()),
            nn.CrossEntropyLoss(),
            PerClass(),
            batch_size=2,
            device="cpu",
        )
