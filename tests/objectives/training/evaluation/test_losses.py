"""Losses: the default of each metric, and means that do not depend on the batches."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from hpsearch import Dataset, ObjectiveError, Splits, TrainConfig, classification
from hpsearch.objectives.training.evaluation.evaluate import evaluate
from hpsearch.objectives.training.evaluation.losses import (
    BinaryLogits,
    SquaredError,
    as_additive_loss,
    build_default_loss,
    compute_mean_loss,
)
from hpsearch.objectives.training.evaluation.metrics import binary
from hpsearch.objectives.training.evaluation.running_metrics import RunningMetrics
from hpsearch.objectives.training.evaluation.step import Step, detach_outputs
from hpsearch.objectives.training.loop.sanity_checks import list_config_warnings
from tests.objectives.training.support import Wine, built, fit, take_step, weights_of


def _regression(outputs=1, squeezed=False, **replaced):
    def data(_self, seed):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(120, 13))
        return Splits.make(x, x[:, 0] - 2 * x[:, 1] + 3, seed=seed)

    def model(*_):
        return nn.Sequential(nn.Linear(13, outputs), nn.Flatten(0)) if squeezed else nn.Linear(13, outputs)

    return {"metric": "rmse", "direction": "minimize", "data": data, "model": model, **replaced}


@pytest.mark.parametrize("squeezed", [True, False])
@pytest.mark.parametrize("metric", ["rmse", "mae", "loss"])
def test_a_regression_without_a_loss_trains_the_squared_error(objective_with, squeezed, metric):
    objective = objective_with(**_regression(squeezed=squeezed, metric=metric))
    result = fit(objective, TrainConfig(lr=0.3, batch_size=8, weight_decay=0.0), epochs=20)
    assert result.best_metrics["val_rmse"] < 1.0
    assert result.best_metrics["val_loss"] == pytest.approx(result.best_metrics["val_rmse"] ** 2, rel=1e-4)


def test_integer_targets_are_values_in_a_regression(objective_with):
    def data(_self, seed):
        x = np.random.default_rng(0).normal(size=(120, 13))
        return Splits.make(x, np.round(20 * x[:, 0]).astype(int), seed=seed)  # below 0, and each rare

    result = fit(objective_with(**_regression(data=data)), TrainConfig(lr=1.0, batch_size=8), epochs=20)
    assert result.best_metrics["val_rmse"] < 5.0


@pytest.mark.parametrize("outputs", [1, 2])
def test_two_classes_are_trained_by_one_logit_or_two(objective_with, outputs):
    def data(_self, seed):
        x = np.random.default_rng(0).normal(size=(200, 13))
        return Splits.make(x, (x[:, 0] > 0).astype(int), seed=seed)

    objective = objective_with(metric="auroc", data=data, model=lambda *_: nn.Linear(13, outputs))
    result = fit(objective, TrainConfig(lr=0.1, batch_size=32), epochs=20)
    assert result.best_value > 0.8


def test_two_logits_are_evaluated_and_trained_as_their_difference():
    torch.manual_seed(0)
    two, y = torch.randn(50, 2), torch.arange(50) % 2
    one = two[:, 1] - two[:, 0]
    assert torch.allclose(BinaryLogits()(two, y), functional.cross_entropy(two, y, reduction="none"), atol=1e-6)
    assert torch.allclose(BinaryLogits(0.1)(two, y), BinaryLogits(0.1)(one[:, None], y))
    found = []
    for output in (two, one):
        metrics = binary()
        metrics.update(output, y)
        found.append({name: float(value) for name, value in metrics.compute().items()})
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("metric", "y", "message"),
    [
        (
            "accuracy",
            torch.rand(9),
            "'accuracy' is incompatible with targets .*compatible metrics: rmse, mae, r2, loss",
        ),
        ("frechet", torch.rand(9, 2), "metric 'frechet' has no default loss for targets that are not .*override loss"),
    ],
)
def test_a_loss_without_a_default_must_be_given(metric, y, message):
    with pytest.raises(ObjectiveError, match=message):
        build_default_loss(metric, y)
    assert isinstance(build_default_loss("frechet", torch.arange(3)), nn.CrossEntropyLoss)
    with pytest.raises(
        ObjectiveError, match=r"label_smoothing=0.1 needs class labels, but the default loss for r2 is the sq"
    ):
        build_default_loss("r2", torch.rand(9), label_smoothing=0.1)


class _ByHand(nn.Module):
    def forward(self, output, target):
        return (output - target).abs().mean()


class _Table(nn.Module):
    def forward(self, output, target):
        return (output - target).square()


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (nn.MSELoss(), r"every output with every target: outputs are \[n, 1\], targets \[n\]; reshape one of them"),
        (_ByHand(), r"every output with every target: outputs are \[n, 1\], targets \[n\]; reshape one of them"),
        (
            _Table(),
            r"the loss has shape \[32, 32\] for outputs \[32, 1\] and targets \[32\]; return one value per sample",
        ),
    ],
)
def test_a_broadcasting_loss_is_rejected(objective_with, loss, message):
    with pytest.raises(ObjectiveError, match=message):
        fit(objective_with(**_regression(loss=lambda *_: loss)))
    result = fit(objective_with(**_regression(squeezed=True, loss=lambda *_: loss)), epochs=1)
    assert len(result.history) == 1


def _tokens(seed=0):
    torch.manual_seed(seed)
    x, y = torch.randn(30, 5, 7), torch.randint(0, 5, (30, 7))
    y[torch.rand(30, 7) < 0.6] = -100
    y[3] = -100
    return x, y


@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 2, 0.5, 3, 1])])
@pytest.mark.parametrize("batch_size", [1, 4, 30])
def test_batches_with_uneven_target_counts_are_averaged_as_one_batch(weight, batch_size):
    x, y = _tokens()
    loss = nn.CrossEntropyLoss(weight=weight)
    data = Dataset(x, y)
    found = evaluate(nn.Identity(), data, as_additive_loss(loss, y), _None(), batch_size=batch_size, device="cpu")
    assert found["loss"] == pytest.approx(float(loss(x, y)), rel=1e-5)


class _None:
    def update(self, output, target):
        pass

    def compute(self):
        return {}

    def reset(self):
        pass

    def to(self, device):
        pass


def test_a_loss_with_sum_reduction_is_unchanged():
    for loss in (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(weight=torch.ones(5), reduction="none"), SquaredError()):
        assert as_additive_loss(loss, torch.arange(5)) is loss
    with pytest.raises(ObjectiveError, match="MSELoss must not use reduction='sum'; use 'none' or 'mean'"):
        as_additive_loss(nn.MSELoss(reduction="sum"), torch.rand(3))


def test_accumulation_with_uneven_target_counts_equals_one_batch(objective_with):
    """The step does not depend on the micro-batches, and one without counted targets has no effect."""

    def data(self, seed):
        good = type(self).__mro__[1].data(self, seed)
        good.train.y[:12] = -100
        return good

    found = []
    for window in ([list(range(24))], [list(range(8)), list(range(8, 14)), list(range(14, 24))]):
        run = built(objective_with(data=data), optimizer="sgd", gradient_accumulation_steps=2, batch_size=12)
        loss, _ = take_step(run, *window)
        found.append((float(loss), weights_of(run)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert torch.allclose(found[0][1], found[1][1], atol=1e-6)


def test_a_loss_over_pairs_is_trained_with_a_warning(objective_with):
    class Pairs(nn.Module):
        def forward(self, output, target):
            return functional.cross_entropy(output[:, :3] @ output[:, :3].T, torch.arange(len(output)) % len(target))

    run = built(objective_with(loss=lambda *_: Pairs()))
    assert any("the loss of a batch is not the mean over its samples" in line for line in list_config_warnings(run))
    assert not any("not the mean" in line for line in list_config_warnings(built(objective_with())))


def test_ignore_index_is_not_counted_as_a_class():
    """It may be any integer. In segmentation, 255 marks pixels without a label."""

    class Unlabelled(Wine):
        def data(self, seed):
            splits = super().data(seed)
            splits.train.y[::7] = 255
            return splits

        def loss(self, config, train):
            return nn.CrossEntropyLoss(ignore_index=255)

        def metrics(self, train):
            return classification(3)

    assert fit(Unlabelled(), epochs=2).best_value > 0.3
    with pytest.raises(ObjectiveError, match="labels go up to 255; add outputs, or set ignore_index of the loss"):
        fit(type("Plain", (Unlabelled,), {"loss": lambda *_: nn.CrossEntropyLoss()})(), epochs=1)


class Focal(nn.CrossEntropyLoss):
    """A subclass whose own `forward` returns the mean over the samples."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, target, self.weight, reduction="none").mean()


def test_a_subclass_of_cross_entropy_with_its_own_mean_is_not_divided_by_class_weights():
    loss = Focal(weight=torch.tensor([1.0, 5.0]))
    assert as_additive_loss(loss, torch.tensor([0, 1])) is loss


def test_complex_outputs_reach_the_loss():
    output = torch.tensor([[3 + 4j]])
    value = compute_mean_loss(Modulus(), output, torch.tensor([[5.0]]), 1)
    assert value.item() == 0


class Modulus(nn.Module):
    """A loss of complex outputs."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output.abs() - target).square().mean()


def test_outputs_for_training_metrics_keep_their_types():
    outputs = {"path": torch.tensor([1]), "mask": torch.tensor([True]), "logits": torch.ones(1, dtype=torch.bfloat16)}
    types = {name: value.dtype for name, value in detach_outputs(outputs).items()}
    assert types == {"path": torch.int64, "mask": torch.bool, "logits": torch.float32}


def test_outputs_for_training_metrics_keep_their_attributes():
    class Output(dict):
        def __getattr__(self, name):
            return self[name]

    assert detach_outputs(Output(logits=torch.ones(1, requires_grad=True))).logits.requires_grad is False


@pytest.mark.parametrize("shape", [(), (2,)])
def test_training_metrics_accept_outputs_of_different_lengths(shape):
    class Count:
        def __init__(self):
            self.total = 0

        def update(self, output, target):
            self.total += output.numel() + target.numel()

        def compute(self):
            return {"total": torch.tensor(float(self.total))}

        def reset(self):
            self.total = 0

    found = RunningMetrics(Count())
    for length in (3, 5):
        outputs = torch.zeros(4, length, *shape)
        found.add(Step(torch.zeros(()), outputs, outputs[..., 0] if shape else outputs, {}, None), 4)
    assert found.compute()["total"] == (4 * 8 * 2 if not shape else 4 * 8 * 3)
