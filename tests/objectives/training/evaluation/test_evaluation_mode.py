"""An evaluation does not change the model."""

import pytest
import torch
from torch import nn

from hpsearch import LocalSession, TrainConfig, Trainer
from hpsearch.objectives.training.checks.restore_best import restore_best
from hpsearch.objectives.training.evaluation.evaluate import evaluation_mode
from hpsearch.objectives.training.reproducibility import checkpoint


class Observer(nn.Module):
    """Scales inputs by a running maximum, in evaluation mode too, as `torch.ao.quantization.FakeQuantize` does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.ones(1))

    def forward(self, x):
        self.largest.lerp_(x.detach().abs().max(), 0.1)
        return x / self.largest


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("last", torch.zeros(0))
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x):
        self.steps = self.steps + 1  # another tensor
        self.last.resize_(x.shape).copy_(x)
        self.cache = torch.ones(9)
        return x


def test_changed_replaced_and_resized_buffers_are_restored():
    model = Counter()
    steps, last = model.steps, model.last
    with evaluation_mode(model, torch.device("cpu"), "test"):
        model(torch.ones(3))
    assert model.steps is steps
    assert (model.last is last, model.last.numel()) == (True, 0)
    assert model.cache.numel() == 9  # not stored, and possibly related to other attributes


def test_a_scripted_model_is_evaluated():
    model = torch.jit.trace(nn.BatchNorm1d(3).eval(), torch.randn(4, 3))
    with evaluation_mode(model, torch.device("cpu"), "test"):
        model(torch.randn(4, 3))


@pytest.mark.parametrize("ema_decay", [None, 0.9])
def test_the_best_weights_of_a_model_with_observers_reproduce_their_score(objective_with, tmp_path, ema_decay):
    def model(self, config, train):
        return nn.Sequential(nn.Linear(13, 8), Observer(), nn.ReLU(), nn.Linear(8, 3))

    objective = objective_with(model=model)
    config = TrainConfig(lr=0.01, ema_decay=ema_decay)
    result = Trainer(objective, config, epochs=3, seed=0, session=LocalSession(tmp_path)).fit()
    restored = restore_best(objective, checkpoint.read(tmp_path / "best.pt"))
    assert restored.validate()["loss"] == result.history[result.best_epoch].metrics["val_loss"]
