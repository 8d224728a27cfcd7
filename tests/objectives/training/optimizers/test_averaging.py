import pytest
import torch
from torch import nn

from hpsearch import Standardize, TrainConfig, Trainer, evaluate, load_objective
from hpsearch.objectives.training.evaluation.step import call_single
from hpsearch.objectives.training.loop.epoch import train_epoch
from hpsearch.objectives.training.optimizers.averaging import _SWA, build_average
from tests.objectives.training.support import built, started, take_step

SWA = TrainConfig(optimizer="sgd", lr=0.2, batch_size=16, swa_fraction=0.5, schedule="constant", warmup_fraction=0.0)


def _normed(_self, _config, train):
    return nn.Sequential(Standardize.fit(train.x), nn.Linear(13, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def _epoch(run, epoch):
    """Return the weights at the end of an epoch of training."""
    train_epoch(run, epoch)
    run.weight_averaging.after_epoch(epoch, run.batch_source.inputs, call_single)
    return nn.utils.parameters_to_vector(run.model.parameters()).detach().clone()


def test_swa_evaluates_the_mean_of_the_last_epochs(objective_with):
    run = started(objective_with(model=_normed), SWA, epochs=6)
    weights = [_epoch(run, epoch) for epoch in range(3)]
    assert run.eval_model is run.model, "nothing is averaged yet"
    weights += [_epoch(run, epoch) for epoch in (3, 4, 5)]
    judged = nn.utils.parameters_to_vector(run.eval_model.parameters())
    torch.testing.assert_close(judged, torch.stack(weights[3:]).mean(0))


def test_swa_recomputes_the_batch_norm_statistics_for_the_mean(objective_with):
    run = started(objective_with(model=_normed), SWA, epochs=2)
    for epoch in range(2):
        _epoch(run, epoch)
    layer, norm = run.eval_model[1], run.eval_model[2]
    hidden = layer(run.eval_model[0](run.splits.train.x)).detach()
    sizes = [len(batch) for batch in torch.split(hidden, 16)]
    means = torch.stack([batch.mean(0) for batch in torch.split(hidden, 16)])
    assert len(sizes) == int(norm.num_batches_tracked)
    torch.testing.assert_close(norm.running_mean, means.mean(0), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(norm.running_mean, run.model[2].running_mean)


@pytest.mark.parametrize(("fraction", "epochs", "first"), [(0.5, 6, 3), (0.25, 4, 3), (0.01, 4, 3), (1.0, 4, 0)])
def test_swa_starts_in_time_for_at_least_one_epoch(fraction, epochs, first):
    average = build_average(nn.Linear(1, 1), TrainConfig(swa_fraction=fraction), epochs)
    assert isinstance(average, _SWA)
    assert average.first == first


@pytest.mark.parametrize("settings", [{"swa_fraction": 0.5}, {"ema_decay": 0.9}])
def test_the_evaluated_weights_are_the_saved_weights(settings):
    objective = load_objective("digits")
    config = TrainConfig(lr=1e-2, **settings, model={"kind": "cnn", "layers": 2, "width": 8, "dropout": 0.1})
    result = Trainer(objective, config, epochs=4, seed=0).fit()
    scores = evaluate(
        result.model,
        result.val,
        objective.loss(config, result.val),
        objective.metrics(result.val),
        batch_size=100,
        device="cpu",
    )
    assert scores["accuracy"] == pytest.approx(result.best_value, abs=1e-6)
    assert scores["loss"] == pytest.approx(result.best_metrics["val_loss"], rel=1e-5), "which no other weights have"


def test_ema_weights_are_evaluated_from_the_first_epoch_on(objective_with):
    objective = objective_with(model=_normed)
    averaged, plain = (
        Trainer(objective, TrainConfig.from_dict({**SWA.to_dict(), "swa_fraction": share}), epochs=6, seed=0).fit()
        for share in (0.5, None)
    )
    same = [
        one.metrics["val_loss"] == other.metrics["val_loss"]
        for one, other in zip(averaged.history, plain.history, strict=True)
    ]
    # The first mean is of one epoch's weights, with recomputed statistics of batch norm.
    assert same == [True, True, True, False, False, False]


def test_the_moving_average_follows_its_formula_and_copies_the_buffers(objective_with):
    def model(_self, _config, train):
        return nn.Sequential(Standardize.fit(train.x), nn.Linear(13, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    run = built(objective_with(model=model), ema_decay=0.5, lr=0.05)
    take_step(run, range(20))
    expected = run.model[1].weight.detach().clone()
    for count in range(1, 4):
        take_step(run, range(20 * count, 20 * count + 20))
        decay = min(0.5, (1 + count) / (10 + count))
        expected = decay * expected + (1 - decay) * run.model[1].weight.detach()
    torch.testing.assert_close(run.eval_model[1].weight, expected)
    assert run.eval_model is not run.model
    assert torch.equal(run.eval_model[2].running_mean, run.model[2].running_mean)
    assert torch.equal(run.eval_model[0].mean, run.model[0].mean)
