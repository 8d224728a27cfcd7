"""Metrics of a whole split, from `Objective.evaluate`."""

import pytest
import torch
from torch import nn

from hpsearch import LocalSession, Objective, ObjectiveError, Splits, Step, TrainConfig
from hpsearch.objectives.training.checks.restore_best import RestoredModel
from hpsearch.objectives.training.loop.guards import NonFiniteError
from tests.objectives.training.support import Stopped, Wine, fit, same_result


class Points(Objective):
    """A generator of points; the metric calls the model with its own random inputs."""

    metric = "distance"
    direction = "minimize"
    loss_floor = None

    def __init__(self):
        super().__init__()
        self.sizes = []

    def suggest(self, trial):
        return TrainConfig()

    def data(self, seed):
        generator = torch.Generator().manual_seed(1)
        noise, points = torch.randn(150, 2, generator=generator), torch.randn(150, 2, generator=generator) + 3
        return Splits.make(noise, points, seed=seed, stratify=False)

    def model(self, config, train):
        return nn.Linear(2, 2)

    def step(self, model, batch, config):
        return Step((model(batch.x) - batch.y).square().mean(1))

    def evaluate(self, model, part, config):
        self.sizes.append(len(part))
        made = torch.cat([model(torch.randn_like(batch.x)) for batch in part.batches(7)])
        return {"distance": (made.mean(0) - part.y.mean(0)).norm()}


class Partial(Wine):
    """A metric of samples that not each batch has."""

    def step(self, model, batch, config):
        outputs = model(batch.x)
        loss = nn.functional.cross_entropy(outputs, batch.y, reduction="none")
        return Step(loss, outputs, metrics={"rare": 1.0} if (batch.y == 2).sum() > 1 else {})


def test_a_metric_of_some_batches_only_is_rejected():
    with pytest.raises(ObjectiveError, match=r"step\(\) returns the metric 'rare' only for some batches"):
        fit(Partial(), TrainConfig(batch_size=4, eval_batch_size=4))


class InPlace(nn.Linear):
    def forward(self, x):
        x -= 1
        return super().forward(x)


class AddsAnEntry(nn.Module):
    """A model that changes the dictionary of its inputs, which is new for each batch."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(13, 3)

    def forward(self, batch):
        batch["scaled"] = batch["x"] / 10
        return self.linear(batch["scaled"])


class DictWine(Wine):
    def data(self, seed):
        splits = super().data(seed)
        return Splits.make({"x": splits.train.x}, splits.train.y, seed=seed)

    def model(self, config, train):
        return AddsAnEntry()


def test_a_model_may_add_an_entry_to_the_dictionary_of_its_inputs():
    assert fit(DictWine(), epochs=1).status == "completed"


class Cached(nn.Linear):
    """A model that makes a tensor in its first pass, which is that of an evaluation, and uses it in training."""

    scale = None

    def forward(self, x):
        if self.scale is None:
            self.scale = torch.ones(x.shape[1])
        return super().forward(x * self.scale)


def test_a_model_that_changes_its_input_in_place_is_rejected():
    with pytest.raises(
        ObjectiveError, match=r"the model or step\(\) changes its input in place, which changes the validation"
    ):
        fit(type("Objective", (Wine,), {"model": lambda *_: InPlace(13, 3)})(), epochs=1)


def test_a_model_function_that_changes_the_training_data_in_place_is_rejected():
    def model(_, __, train):
        train.x.sub_(train.x.mean(0))
        return nn.Linear(13, 3)

    with pytest.raises(ObjectiveError, match=r"^Objective\.model changes the training data in place, and not the val"):
        fit(type("Objective", (Wine,), {"model": model})(), epochs=1)


def test_a_model_may_keep_a_tensor_of_its_first_evaluation():
    assert fit(type("Objective", (Wine,), {"model": lambda *_: Cached(13, 3)})(), epochs=1).status == "completed"


class WithoutReturn(nn.Linear):
    """A module whose `train` returns nothing, and so its `eval` neither."""

    def train(self, mode=True):
        super().train(mode)


def test_a_model_whose_train_method_returns_nothing_is_exported():
    model = type("Objective", (Wine,), {"model": lambda *_: WithoutReturn(13, 3)})
    assert fit(model(), epochs=1).exportable_model().module(torch.randn(2, 13)).shape == (2, 3)


def test_the_metric_is_reported_per_epoch_and_selects_the_best_epoch():
    objective = Points()
    found = fit(objective, epochs=3)
    values = [record.metrics["val_distance"] for record in found.history]
    assert (found.best_value, values[found.best_epoch]) == (min(values), min(values))
    assert objective.sizes == [30] * 4, "before training and after each epoch, on the validation split only"
    same_result(fit(Points(), epochs=3), found)
    splits, config = objective.data(0), TrainConfig()
    restored = RestoredModel(objective, config, splits, found.model)
    assert restored.validate()["distance"] == found.best_value
    assert restored.test()["distance"] != found.best_value


def test_a_stopped_run_continues_with_the_same_values(tmp_path):
    whole = fit(Points(), epochs=3)
    assert fit(Points(), epochs=3, session=Stopped(tmp_path, 0)).status == "stopped"
    same_result(fit(Points(), epochs=3, session=LocalSession(tmp_path)), whole)


def test_a_run_on_a_new_split_has_an_optimism_and_a_standard_error():
    objective = Points()
    found = fit(objective, epochs=3, resplit_seed=1)
    score = found.resplit_score
    assert score.value == found.best_value - score.optimism
    assert score.optimism <= 0, "lower is better"
    assert score.error > 0
    assert objective.sizes[:7] == [30, 30, 15, 15, 30, 15, 15]


class Named(Wine):
    def __init__(self, found):
        super().__init__()
        self.found = found

    def evaluate(self, model, part, config):
        return self.found


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"accuracy": 1.0}, "evaluate\\(\\) returns 'accuracy', which is already a metric; use another name"),
        (0.5, "Named.evaluate must return a dict such as {'distance': 1.5}, not float"),
        ({"spread": torch.zeros(3)}, "metric 'spread' must be one number, not a tensor"),
        ({"spread": "good"}, "metric 'spread' must be a number, not 'good'"),
        ({"spr\x1bead": 1.0}, r"metric name 'spr\\x1bead' must be a text without control characters"),
        ({1: 1.0}, "metric name 1 must be a text"),
    ],
)
def test_a_wrong_result_is_an_error_before_training(found, message):
    with pytest.raises(ObjectiveError, match=message):
        fit(Named(found), epochs=1)


def test_the_metric_needs_not_be_that_of_the_study():
    found = fit(Named({"spread": 0.15}), epochs=2)
    assert [record.metrics["val_spread"] for record in found.history] == [0.15, 0.15], "not rounded to float32"
    assert found.curve.metric == "accuracy"


def test_a_missing_metric_is_an_error_before_training():
    objective = Named({"spread": 0.25})
    objective.set_metric("breadth", "maximize")
    with pytest.raises(ObjectiveError, match="metric 'breadth' is not a metric of Named; "):
        fit(objective, epochs=1)


class Large(Points):
    """The metric needs more samples than half of the validation split has."""

    def evaluate(self, model, part, config):
        if len(part) < 20:
            raise ValueError("too few samples")
        return super().evaluate(model, part, config)


def test_a_metric_that_halves_cannot_have_is_that_of_the_best_epoch():
    found = fit(Large(), epochs=2, resplit_seed=1)
    score = found.resplit_score
    assert (score.value, score.optimism, score.error) == (found.best_value, None, None)


def switch_to_training(model):
    model.train()


def add_to_weight(model):
    model.weight.data.add_(1)


def convert_to_half(model):
    model.half()


def freeze(model):
    model.requires_grad_(False)


class Changing(Points):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def evaluate(self, model, part, config):
        found = super().evaluate(model, part, config)
        self.change(model)
        return found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (switch_to_training, "the model was switched to training mode"),
        (add_to_weight, "the values of weight changed"),
        (convert_to_half, "dtype of weight was float32 and is float16"),
        (freeze, "requires_grad of weight was True and is False"),
    ],
)
def test_a_change_of_the_model_is_an_error_before_training(change, message):
    with pytest.raises(ObjectiveError, match=rf"^Changing.evaluate changes the model: {message}; use a copy"):
        fit(Changing(change), epochs=1)


class Undefined(Points):
    def evaluate(self, model, part, config):
        self.sizes.append(len(part))
        return {"distance": float("nan") if len(self.sizes) > 1 else 1.0}


def test_an_undefined_metric_of_a_finite_model_does_not_blame_the_learning_rate():
    with pytest.raises(NonFiniteError, match=r"^val_distance is nan at epoch 1, although val_loss is [\d.]+$"):
        fit(Undefined(), epochs=2)
