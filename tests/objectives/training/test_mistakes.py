"""Mistakes in an objective or in the settings of a run raise an error before training."""

import threading

import pytest
import torch
from torch import nn

from hpsearch import Dataset, ObjectiveError, Splits, TrainConfig, Trainer, load_objective
from hpsearch.objectives.errors import wrap_training_errors
from tests.objectives.training.support import Memory, fit


def _wine_but(**parts):
    def data(_self, seed):
        good = load_objective("breast_cancer").data(seed)
        return Splits(**{"train": good.train, "val": good.val, "test": good.test, **parts})

    return data


NET = nn.Linear(13, 3)


class CountsCalls(nn.Linear):
    """A layer with extra state that is no tensor."""

    def get_extra_state(self):
        return {"calls": 0}

    def set_extra_state(self, state):
        pass


class EmbedsBins(nn.Module):
    """A model with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.EmbeddingBag(8, 3, sparse=True)

    def forward(self, x):
        return self.embedding(x.long().clamp(0, 7))


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"data": lambda *_: (1, 2)}, "Changed.data must return Splits, not tuple"),
        ({"data": _wine_but(val=Dataset(torch.zeros(0, 30), torch.zeros(0).long()))}, "validation split is empty"),
        ({"data": lambda *_: 1 / 0}, r"Changed.data: .*test_mistakes.py:\d+: ZeroDivisionError: division by zero"),
        ({"model": lambda *_: "net"}, "model\\(\\) must return a torch.nn.Module, not str"),
        ({"model": lambda *_: nn.Flatten()}, "has no parameters to train"),
        ({"model": lambda *_: nn.Linear(12, 3)}, "Changed on the validation split: RuntimeError: .*shapes cannot be"),
        ({"model": lambda *_: nn.Linear(13, 2)}, r"returns \[2\] outputs per sample, but labels go up to 2"),
        (
            {"model": lambda *_: nn.Sequential(NET, nn.Flatten(0))},
            r"returns \[6\] for 2 inputs; dim 0 must be the batch",
        ),
        (
            {"model": lambda *_: nn.LSTM(13, 3)},
            "the model returns a tuple, but accuracy needs a tensor",
        ),
        (
            {"model": lambda *_: nn.Sequential(CountsCalls(13, 3))},
            r"Changed.model has a dict in its state_dict\(\) at '0._extra_state'; return a tensor from get_extra_state",
        ),
        ({"model": lambda *_: EmbedsBins()}, "sparse gradients, which are not supported; set sparse=False in its emb"),
        (
            {"model": lambda *_: nn.Sequential(nn.Linear(13, 3), nn.Sigmoid(), nn.ReLU(inplace=True))},
            r"an in-place operation changes a tensor that the backward pass needs; replace operations such as h",
        ),
        ({"augment": lambda *_: lambda x: x[:1]}, r"Changed.augment must return one input per sample, not \[1, 13\]"),
        ({"loss": lambda *_: nn.MSELoss(reduction="sum")}, "MSELoss must not use reduction='sum'"),
        ({"metric": "acuracy"}, "metric 'acuracy' is not built in; did you mean 'accuracy'"),
        (
            {"metric": "recall", "metrics": lambda s, t: type(s).__mro__[1]().metrics(t)},
            "is not a metric of Changed",
        ),
        (
            {"metric": "auroc"},
            "'auroc' is incompatible with 3 outputs per sample for 3 classes; compatible metrics: accuracy, mac",
        ),
        ({"metric": "loss"}, "direction 'maximize' is wrong for 'loss'; use 'minimize'"),
        ({"direction": "minimize"}, "direction 'minimize' is wrong for 'accuracy'; use 'maximize'"),
    ],
)
def test_a_mistake_in_the_objective_is_reported_before_training(objective_with, tmp_path, replaced, message):
    session = Memory()
    with pytest.raises(ObjectiveError, match=message) as caught:
        fit(objective_with(**replaced), session=session)
    assert "\n" not in str(caught.value)
    assert not session.saved
    assert not session.reported


def test_a_batch_that_is_too_small_for_batch_norm_is_an_error_with_a_remedy(objective_with):
    objective = objective_with(model=lambda *_: nn.Sequential(nn.BatchNorm1d(13), nn.Linear(13, 3)))
    with pytest.raises(ObjectiveError, match="batch norm cannot normalize; use a batch_size of 2 or more"):
        fit(objective, TrainConfig(batch_size=1))


def test_an_error_of_a_model_of_pytorchs_modules_is_an_error_of_the_objective():
    with pytest.raises(ValueError, match="Expected more than 1 value") as caught:
        nn.BatchNorm1d(2)(torch.zeros(1, 2))
    error = caught.value.with_traceback(caught.tb.tb_next)  # without this function, which is code of a user
    wrapped = wrap_training_errors("Net in training")
    wrapped.__enter__()
    with pytest.raises(ObjectiveError, match=r"^Net in training: ValueError: Expected more than 1 value per channel"):
        wrapped.__exit__(type(error), error, error.__traceback__)


def test_parameters_of_an_earlier_model_are_rejected(objective_with):
    backbone = nn.Linear(13, 8)

    def model(_self, config, train):
        return nn.Sequential(backbone, nn.Linear(8, 3))

    fit(objective_with(model=model))
    with pytest.raises(
        ObjectiveError, match=r"Changed.model returned parameters of an earlier model, which are already"
    ):
        fit(objective_with(model=model))
    backbone.requires_grad_(False)
    fit(objective_with(model=model))


@pytest.mark.parametrize("setting", ["ema_decay", "swa_fraction"])
def test_a_model_that_cannot_be_copied_has_no_average(objective_with, setting):
    def model(_self, config, train):
        layer = nn.Linear(13, 3)
        layer.lock = threading.Lock()
        return layer

    with pytest.raises(ObjectiveError, match=rf"{setting} needs a model that copy.deepcopy can copy: TypeError"):
        fit(objective_with(model=model), TrainConfig(**{setting: 0.5}))


def test_auroc_on_a_split_of_one_class_is_rejected_before_training():
    good = load_objective("breast_cancer")

    class OneClass(type(good)):
        def data(self, seed):
            splits = super().data(seed)
            only = (splits.val.y == 1).nonzero()[:, 0]
            return Splits(splits.train, splits.val.take(only), splits.test)

    with pytest.raises(ObjectiveError, match="auroc needs both classes, but all 43 labels of a split are 1"):
        fit(OneClass(), good.default_config())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1, not 0"),
        ({"device": "cuda:99"}, "device 'cuda:99' is not available"),
        ({"device": "toaster"}, "device 'toaster' is not available"),
    ],
)
def test_bad_settings_of_a_run_are_rejected(wine, settings, message):
    with pytest.raises(ObjectiveError, match=message):
        fit(wine, **settings)


def test_a_configuration_must_be_a_train_config(wine):
    with pytest.raises(ObjectiveError, match="must be a TrainConfig, not dict"):
        Trainer(wine, {"lr": 0.1}, epochs=1, seed=0)
