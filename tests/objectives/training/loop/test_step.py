import copy

import pytest
import torch
from torch import nn

from hpsearch import Splits
from hpsearch.objectives.training.loop.epoch import train_epoch
from tests.objectives.training.support import built, take_step, weights_of


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")  # torch sees the spy
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_order_of_one_step(wine, monkeypatch, precision):
    run = built(wine, precision=precision, batch_size=16, gradient_accumulation_steps=2, ema_decay=0.9)
    calls = []

    def spy(owner, name, label):
        original = getattr(owner, name)

        def called(*args, **kwargs):
            calls.append(label)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, called)

    spy(run.optimizer, "zero_grad", "zero_grad")
    spy(run.model, "forward", "forward")
    spy(run.step_function.loss, "forward", "loss")
    spy(run.precision, "backward", "backward")
    spy(run.precision.scaler, "unscale_", "unscale")
    spy(nn.utils, "clip_grad_norm_", "clip")
    spy(run.finite_guard, "check", "guard")
    spy(run.optimizer, "step", "step")
    spy(run.steplog, "record_step", "record_step")
    spy(run.schedule, "step", "schedule")
    spy(run.weight_averaging, "after_step", "average")
    take_step(run, [0, 1], [2, 3])
    forward = ["forward", "loss", "backward"]
    assert calls == [
        "zero_grad",
        *forward,
        *forward,
        "unscale",
        "record_step",
        "clip",
        "guard",
        "step",
        "schedule",
        "average",
    ]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_accumulated_micro_batches_equal_one_batch(objective_with, reduction):
    objective = objective_with(loss=lambda *_: nn.CrossEntropyLoss(reduction=reduction))
    rows = list(range(40))
    whole, parts = (built(objective, optimizer="sgd", lr=0.5, clip_grad_norm=0.1) for _ in range(2))
    loss, norm = take_step(whole, rows)
    others = take_step(parts, rows[:16], rows[16:32], rows[32:])  # the last micro-batch is shorter
    torch.testing.assert_close(torch.stack([loss, norm]), torch.stack(others))
    torch.testing.assert_close(weights_of(parts), weights_of(whole))


def test_an_epoch_of_accumulated_steps_equals_large_batches_with_the_last_one(wine):
    settings = {"optimizer": "sgd", "lr": 0.1, "drop_last": False}
    large = built(wine, batch_size=32, **settings)  # 106 samples: the tail has 10
    small = built(wine, batch_size=8, gradient_accumulation_steps=4, **settings)
    scores = [train_epoch(run, 0) for run in (large, small)]
    assert large.step == small.step == 4
    torch.testing.assert_close(weights_of(small), weights_of(large))
    assert scores[0].scores == pytest.approx(scores[1].scores, rel=1e-5)
    assert scores[0].samples == scores[1].samples == 106


def test_the_gradient_is_clipped_and_its_unclipped_norm_returned(wine):
    run = built(wine, optimizer="sgd", momentum=0.0, lr=1.0, weight_decay=0.0, clip_grad_norm=1e-3)
    before = weights_of(run)
    _, norm = take_step(run, range(30))
    assert norm > 0.1
    assert float((weights_of(run) - before).norm()) == pytest.approx(1e-3, rel=1e-3)
    free = built(wine, optimizer="sgd", momentum=0.0, lr=1.0, weight_decay=0.0, clip_grad_norm=None)
    _, unclipped = take_step(free, range(30))
    assert unclipped == norm
    assert float((weights_of(free) - before).norm()) == pytest.approx(float(norm), rel=1e-4)


def test_the_gradient_may_be_clipped_by_value(wine):
    settings = {"optimizer": "sgd", "momentum": 0.0, "lr": 1.0, "weight_decay": 0.0, "clip_grad_norm": None}
    run = built(wine, clip_grad_value=0.01, **settings)
    before = weights_of(run)
    _, norm = take_step(run, range(30))
    free = built(wine, **settings)
    _, unclipped = take_step(free, range(30))
    assert norm == unclipped
    gradient = before - weights_of(free)
    torch.testing.assert_close(before - weights_of(run), gradient.clamp(-0.01, 0.01))
    assert float(gradient.abs().max()) > 0.01


def test_running_metrics_are_those_of_all_samples(wine):
    run = built(wine, batch_size=8, lr=1e-12, drop_last=False, weight_decay=0.0)
    trained = train_epoch(run, 0)
    output = run.model(run.splits.train.x)
    assert trained.scores["loss"] == pytest.approx(
        float(run.step_function.loss(output.detach(), run.splits.train.y)), rel=1e-4
    )
    expected = float((output.detach().argmax(1) == run.splits.train.y).double().mean())
    assert trained.scores["accuracy"] == pytest.approx(expected)


def test_a_short_batch_is_kept_if_it_is_the_only_one(objective_with):
    def data(_self, seed):
        torch.manual_seed(seed)
        return Splits.make(torch.randn(30, 13), torch.arange(30) % 3, seed=seed)

    run = built(objective_with(data=data), batch_size=64)
    assert train_epoch(run, 0).samples == 18


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")  # torch sees the spy
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_last_shorter_accumulation_window_is_handled_like_the_others(wine, precision):
    """With plain SGD, a clipped step has the length rate times limit, which detects an unclipped gradient."""
    plain = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "lr": 1.0, "drop_last": False}
    run = built(wine, precision=precision, batch_size=8, gradient_accumulation_steps=4, clip_grad_norm=1e-3, **plain)
    lengths, original = [], run.optimizer.step

    def measured(*args, **kwargs):
        before = weights_of(run)
        original(*args, **kwargs)
        lengths.append(float((weights_of(run) - before).norm()))

    run.optimizer.step = measured
    sizes = [sum(batch.size for batch in window) for window in run.batch_source.iterate_steps(0)]
    trained = train_epoch(run, 0)
    assert sizes == [32, 32, 32, 10]
    assert lengths == pytest.approx([1e-3] * 4, rel=1e-2)
    assert trained.grad_norm > 0.1


def test_the_recorded_norm_is_the_mean_over_steps_before_clipping(wine):
    run = built(wine, batch_size=16, log_every=1, clip_grad_norm=1e-3)
    trained = train_epoch(run, 0)
    norms = [record["grad_norm"] for record in run.steplog.drain()]
    assert len(norms) == 6
    assert trained.grad_norm == pytest.approx(sum(norms) / 6, rel=1e-5)


def test_an_epoch_equals_a_loop_written_by_hand(wine):
    """Plain SGD; each step uses the mean over its own samples: 32, 32, 32 and the remaining 10."""
    plain = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "lr": 0.1, "clip_grad_norm": None}
    run = built(wine, batch_size=8, gradient_accumulation_steps=4, drop_last=False, **plain)
    by_hand = copy.deepcopy(run.model)
    for window in run.batch_source.iterate_steps(0):
        x, y = (torch.cat(parts) for parts in zip(*(pending.load()[:2] for pending in window), strict=True))
        by_hand.zero_grad()
        nn.functional.cross_entropy(by_hand(x), y).backward()
        with torch.no_grad():
            for parameter in by_hand.parameters():
                parameter.sub_(0.1 * parameter.grad)
    train_epoch(run, 0)
    torch.testing.assert_close(weights_of(run), nn.utils.parameters_to_vector(by_hand.parameters()).detach())


@pytest.mark.parametrize("affine", [True, False])
def test_frozen_layers_keep_their_statistics(objective_with, affine):
    def model(*_):
        body = nn.Sequential(nn.Linear(13, 8), nn.BatchNorm1d(8, affine=affine))
        return nn.Sequential(body.requires_grad_(False), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    run = built(objective_with(model=model), batch_size=16)
    frozen, free = run.model[0][1], run.model[2]
    before = frozen.running_mean.clone(), free.running_mean.clone()
    train_epoch(run, 0)
    assert torch.equal(frozen.running_mean, before[0])
    assert not torch.equal(free.running_mean, before[1])
    run.model[0].requires_grad_(True)
    if affine:  # a norm without parameters follows the layer that contains it
        run.model[0][0].requires_grad_(False)
    train_epoch(run, 1)
    assert not torch.equal(frozen.running_mean, before[0]), "thawed"
