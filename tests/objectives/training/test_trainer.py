import pytest
import torch
from torch import nn

from hpsearch import Standardize, TrainConfig, Verdict, evaluate
from hpsearch.objectives.training.reproducibility import checkpoint
from tests.objectives.training.support import Memory, fit


@pytest.mark.slow
def test_a_run_learns_and_has_a_record_of_each_epoch(wine, tmp_path):
    session = Memory()
    result = fit(wine, session=session, run_dir=tmp_path, split_seed=4)
    assert result.status == "completed"
    assert result.best_value > 0.85
    assert [record.epoch for record in result.history] == list(range(5))
    assert session.reported == result.history
    expected = {"lr", "grad_norm", "epoch_seconds", "samples_per_second"}
    expected |= {f"{side}_{name}" for side in ("train", "val") for name in ("loss", "accuracy", "macro_f1")}
    for record in result.history:
        assert set(record.metrics) == expected
        assert all(type(value) is float for value in record.metrics.values())
    assert [r.timestamp for r in result.history] == sorted(r.timestamp for r in result.history)
    assert result.history[-1].metrics["train_loss"] < result.history[0].metrics["train_loss"]


def test_the_best_epoch_is_the_first_with_the_best_validation_metric(wine):
    session = Memory()
    result = fit(wine, session=session, epochs=8)
    values = [record.metrics["val_accuracy"] for record in result.history]
    assert result.best_epoch == values.index(max(values))
    assert result.best_value == max(values)
    assert result.best_metrics == result.history[result.best_epoch].metrics
    best = [epoch for epoch, improved in session.saved if improved]
    assert best == [i for i, value in enumerate(values) if i == 0 or value > max(values[:i])]


def test_a_minimised_metric_is_minimised(objective_with):
    result = fit(objective_with(metric="loss", direction="minimize"), epochs=8)
    losses = [record.metrics["val_loss"] for record in result.history]
    assert result.best_value == min(losses)
    assert result.best_epoch == losses.index(min(losses)) > 0


@pytest.mark.parametrize("ema", [None, 0.8])
def test_the_restored_best_model_reproduces_its_score(wine, tmp_path, ema):
    config = TrainConfig(lr=0.05, batch_size=32, ema_decay=ema)
    result = fit(wine, config, run_dir=tmp_path, epochs=6)
    loss, metrics = wine.loss(config, result.val), wine.metrics(result.val)
    scores = evaluate(result.model, result.val, loss, metrics, batch_size=7, device="cpu")
    for name, value in scores.items():
        assert value == pytest.approx(result.best_metrics[f"val_{name}"], abs=1e-6)
    assert not result.model.training
    best = checkpoint.read(result.best_path)
    assert (best["epoch"], best["value"]) == (result.best_epoch, result.best_value)
    assert all(torch.equal(tensor, best["model"][name]) for name, tensor in result.model.state_dict().items())
    assert TrainConfig.from_dict(best["config"]) == config
    assert result.example.x.shape == (4, 13)
    assert torch.equal(result.example.x, result.val.x[:4])


def test_the_best_weights_are_restored_after_training_degrades(wine):
    config = TrainConfig(optimizer="sgd", lr=5.0, weight_decay=0.0, schedule="constant", warmup_fraction=0.9)
    result = fit(wine, config, epochs=20)
    assert result.history[-1].metrics["val_accuracy"] < result.best_value
    scores = evaluate(
        result.model, result.val, wine.loss(config, result.val), wine.metrics(result.val), batch_size=99, device="cpu"
    )
    assert scores["accuracy"] == pytest.approx(result.best_value)


def test_a_pruned_run_ends_at_once_with_its_best_epoch(wine, tmp_path):
    session = Memory({2: Verdict.PRUNE})
    result = fit(wine, session=session, run_dir=tmp_path)
    assert result.status == "pruned"
    assert len(result.history) == 3
    assert session.saved[-1][0] == 2
    assert (tmp_path / "report.md").exists()
    assert not (tmp_path / "curves.png").exists(), "drawing takes as long as some pruned runs train"
    assert result.best_value == max(r.metrics["val_accuracy"] for r in result.history)


def test_an_error_of_the_session_ends_the_run(wine):
    class LostError(Exception):
        pass

    class Losing(Memory):
        def report(self, record):
            raise LostError

    with pytest.raises(LostError):
        fit(wine, session=Losing())


def test_the_model_receives_only_training_data(objective_with):
    seen = []

    def model(_self, _config, train):
        seen.append(train)
        return nn.Sequential(Standardize.fit(train.x), nn.Linear(13, 3))

    objective = objective_with(model=model)
    result = fit(objective, epochs=1)
    assert torch.equal(seen[0].x, objective.data(0).train.x)
    torch.testing.assert_close(result.model[0].mean, seen[0].x.mean(0))


def test_a_model_is_always_trained_in_training_mode(objective_with):
    modes = []

    def model(_self, _config, _train):
        net = nn.Linear(13, 3).eval()
        net.register_forward_hook(lambda module, *_: modes.append((module.training, torch.is_grad_enabled())))
        return net

    fit(objective_with(model=model), epochs=2)
    epoch = [(True, True)] * 3 + [(False, False)]
    assert modes == [(False, False)] * 3 + epoch * 2  # three checks before training


def test_loss_and_metrics_receive_only_training_data(objective_with):
    """Class weights and the number of classes are statistics too."""
    seen = []

    def loss(_self, _config, train):
        seen.append(train)
        return nn.CrossEntropyLoss()

    def metrics(self, train):
        seen.append(train)
        return type(self).__mro__[1].metrics(self, train)

    objective = objective_with(loss=loss, metrics=metrics)
    fit(objective, epochs=1)
    expected = objective.data(0).train.x
    assert len(seen) == 2
    assert all(torch.equal(data.x, expected) for data in seen)


def test_a_run_is_not_stopped_early_by_default(wine):
    """In a study the pruner does this, and curves have to stay comparable."""
    still = TrainConfig(lr=1e-9, weight_decay=0.0, batch_size=32)
    assert len(fit(wine, still, epochs=12).history) == 12
    asked = TrainConfig(lr=1e-9, weight_decay=0.0, batch_size=32, patience=2)
    assert len(fit(wine, asked, epochs=12).history) == 3
