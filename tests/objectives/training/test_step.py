import math

import pytest
import torch
from torch import nn

from objectives.training import NonFiniteError, Splits, Standardize, TrainConfig
from objectives.training.build import build
from objectives.training.epoch import RunningMetrics, train_epoch, train_step
from objectives.training.guards import FiniteGuard, Point

POINT = Point(epoch=0, step=0, batch=0, lr=0.1)


def _run(objective, epochs=3, **settings):
    settings = {"warmup_fraction": 0.0, "schedule": "constant", **settings}
    config = TrainConfig(**settings)
    return build(objective, config, epochs=epochs, seed=0, split_seed=0, device=torch.device("cpu"))[0]


def _step(run, *window):
    batches = [run.feed.batch(torch.tensor(rows)) for rows in window]
    return train_step(run, batches, POINT, RunningMetrics(run.metrics))


def _weights(run):
    return nn.utils.parameters_to_vector(run.model.parameters()).detach().clone()


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")  # torch sees the spy
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_order_of_one_step(wine, monkeypatch, precision):
    run = _run(wine, precision=precision, batch_size=16, accumulate=2, ema_decay=0.9)
    calls = []

    def spy(owner, name, label):
        original = getattr(owner, name)

        def called(*args, **kwargs):
            calls.append(label)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, called)

    spy(run.optimizer, "zero_grad", "zero_grad")
    spy(run.model, "forward", "forward")
    spy(run.loss, "forward", "loss")
    spy(run.precision, "backward", "backward")
    spy(run.precision.scaler, "unscale_", "unscale")
    spy(nn.utils, "clip_grad_norm_", "clip")
    spy(run.guard, "check", "guard")
    spy(run.optimizer, "step", "step")
    spy(run.steplog, "note", "note")
    spy(run.schedule, "step", "schedule")
    spy(run.average, "after_step", "average")
    _step(run, [0, 1], [2, 3])
    forward = ["forward", "loss", "backward"]
    assert calls == [
        "zero_grad",
        *forward,
        *forward,
        "unscale",
        "note",
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
    whole, parts = (_run(objective, optimizer="sgd", lr=0.5, clip_grad_norm=0.1) for _ in range(2))
    loss, norm = _step(whole, rows)
    others = _step(parts, rows[:16], rows[16:32], rows[32:])  # the last micro-batch is shorter
    torch.testing.assert_close(torch.stack([loss, norm]), torch.stack(others))
    torch.testing.assert_close(_weights(parts), _weights(whole))


def test_an_epoch_of_accumulated_steps_equals_large_batches_tail_included(wine):
    settings = {"optimizer": "sgd", "lr": 0.1, "drop_last": False}
    large = _run(wine, batch_size=32, **settings)  # 106 samples: the tail has 10
    small = _run(wine, batch_size=8, accumulate=4, **settings)
    scores = [train_epoch(run, 0) for run in (large, small)]
    assert large.step == small.step == 4
    torch.testing.assert_close(_weights(small), _weights(large))
    assert scores[0].scores == pytest.approx(scores[1].scores, rel=1e-5)
    assert scores[0].samples == scores[1].samples == 106


def test_the_gradient_is_clipped_and_its_true_norm_returned(wine):
    run = _run(wine, optimizer="sgd", momentum=0.0, lr=1.0, weight_decay=0.0, clip_grad_norm=1e-3)
    before = _weights(run)
    _, norm = _step(run, range(30))
    assert norm > 0.1
    assert float((_weights(run) - before).norm()) == pytest.approx(1e-3, rel=1e-3)
    free = _run(wine, optimizer="sgd", momentum=0.0, lr=1.0, weight_decay=0.0, clip_grad_norm=None)
    _, unclipped = _step(free, range(30))
    assert unclipped == norm
    assert float((_weights(free) - before).norm()) == pytest.approx(float(norm), rel=1e-4)


def test_bf16_runs_without_a_scaler_and_the_loss_is_in_fp32(objective_with):
    seen = []

    class Loss(nn.CrossEntropyLoss):
        def forward(self, output, target):
            seen.append(output.dtype)
            return super().forward(output, target)

    run = _run(objective_with(loss=lambda *_: Loss()), precision="bf16")
    types = []
    run.model[1][0].register_forward_hook(lambda _m, _i, output: types.append(output.dtype))
    _step(run, range(8))
    assert types == [torch.bfloat16]
    assert set(seen) == {torch.float32}
    assert not run.precision.scaled
    assert all(p.dtype == torch.float32 for p in run.model.parameters())


def test_a_step_that_loss_scaling_skips_moves_nothing(wine):
    run = _run(wine, precision="fp16", schedule="cosine", ema_decay=0.9, epochs=10)
    _step(run, range(8))
    handle = run.model[1][2].weight.register_hook(lambda grad: torch.full_like(grad, math.inf))
    before = (_weights(run), run.schedule.taken, int(run.average.average.n_averaged), run.precision.scaler.get_scale())
    state = {k: v["exp_avg"].clone() for k, v in run.optimizer.state_dict()["state"].items()}
    _step(run, range(8))
    assert torch.equal(_weights(run), before[0])
    assert all(torch.equal(v["exp_avg"], state[k]) for k, v in run.optimizer.state_dict()["state"].items())
    assert (run.schedule.taken, int(run.average.average.n_averaged)) == before[1:3]
    assert run.precision.scaler.get_scale() == before[3] / 2
    assert run.guard.skipped == 1
    handle.remove()
    _step(run, range(8))
    assert run.guard.skipped == 0
    assert run.schedule.taken == before[1] + 1
    assert not torch.equal(_weights(run), before[0])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "sam"])
def test_a_first_step_that_is_skipped_leaves_nothing_behind(wine, optimizer):
    """Optimizers make their state at the first step, and some by memory that only a step that runs fills."""
    settings = {"optimizer": optimizer, "base_optimizer": "sgd", "precision": "fp16", "lr": 0.1}
    skipping, plain = (_run(wine, **settings) for _ in range(2))
    with torch.no_grad():  # what the allocator hands out again is not zero
        garbage = [torch.full_like(p, 1e30) for p in skipping.model.parameters()]
    del garbage
    handle = skipping.model[1][2].weight.register_hook(lambda grad: torch.full_like(grad, math.inf))
    _step(skipping, range(8))
    assert skipping.guard.skipped == 1
    handle.remove()
    for run in (skipping, plain):
        run.precision.scaler.load_state_dict({**run.precision.scaler.state_dict(), "scale": 1024.0})
        for start in range(0, 48, 8):
            _step(run, range(start, start + 8))
    torch.testing.assert_close(_weights(skipping), _weights(plain), rtol=1e-2, atol=1e-3)


def test_the_state_of_loss_scaling_is_kept(wine):
    run = _run(wine, precision="fp16")
    run.model[1][2].weight.register_hook(lambda grad: torch.full_like(grad, math.inf))
    for _ in range(3):
        _step(run, range(8))
    state = {**run.state_dict(), "best": {}, "history": []}
    other = _run(wine, precision="fp16")
    other.load_state_dict(state)
    assert other.precision.scaler.get_scale() == run.precision.scaler.get_scale() == 65536 / 8
    assert other.guard.skipped == 3


def test_skipping_without_end_is_a_divergence(wine):
    run = _run(wine, precision="fp16")
    run.model[1][2].weight.register_hook(lambda grad: torch.full_like(grad, math.inf))
    for _ in range(9):
        _step(run, range(8))
    with pytest.raises(NonFiniteError, match="10 steps in a row had an infinite gradient"):
        _step(run, range(8))


def test_fp16_learns(wine):
    run = _run(wine, precision="fp16", lr=0.02, batch_size=16)
    losses = [train_epoch(run, epoch).scores["loss"] for epoch in range(6)]
    assert losses[-1] < 0.3 * losses[0]


class _Poisoned(nn.Module):
    """A loss that becomes NaN at one call, or whose gradient does."""

    def __init__(self, at, gradient=False):
        super().__init__()
        self.at, self.gradient, self.calls = at, gradient, 0

    def forward(self, output, target):
        loss = nn.functional.cross_entropy(output, target)
        if output.requires_grad:
            self.calls += 1
            if self.calls == self.at and self.gradient:
                output.register_hook(lambda grad: grad * math.nan)
            elif self.calls == self.at:
                return loss * math.nan
        return loss


@pytest.mark.parametrize("gradient", [False, True])
def test_a_non_finite_step_ends_the_epoch_before_the_optimizer(objective_with, gradient):
    run = _run(objective_with(loss=lambda *_: _Poisoned(9, gradient)), batch_size=16, lr=0.25)
    train_epoch(run, 0)  # 6 steps
    weights = []
    original = run.guard.check
    run.guard.check = lambda *args, **kwargs: (weights.append(_weights(run)), original(*args, **kwargs))
    with pytest.raises(NonFiniteError) as caught:
        train_epoch(run, 1)
    error = caught.value
    assert (error.epoch, error.step, error.batch, error.lr) == (1, 8, 2, 0.25)
    assert math.isnan(error.grad_norm)
    what = "gradient norm is nan" if gradient else "loss is nan"
    assert str(error) == f"{what} at epoch 1, step 8, batch 2: learning rate 0.25, gradient norm nan"
    assert torch.equal(_weights(run), weights[-1]), "the bad step was not taken"
    assert bool(torch.isfinite(_weights(run)).all())


def test_on_an_accelerator_steps_are_checked_together_and_the_first_bad_one_is_named():
    guard = FiniteGuard(torch.device("cuda"), every=4)  # the guard itself touches no device
    for step in range(3):
        loss = torch.tensor(math.inf if step == 1 else 1.0)
        guard.check(Point(0, step, step, 0.1), loss, torch.tensor(2.0), scaled=False)
    with pytest.raises(NonFiniteError, match="loss is inf at epoch 0, step 1, batch 1"):
        guard.check(Point(0, 3, 3, 0.1), torch.tensor(math.nan), torch.tensor(2.0), scaled=False)
    guard.check(Point(1, 4, 0, 0.1), torch.tensor(math.nan), torch.tensor(2.0), scaled=False)
    with pytest.raises(NonFiniteError, match="loss is nan at epoch 1, step 4"):
        guard.flush()
    guard.flush()


def test_the_moving_average_follows_its_formula_and_takes_the_buffers(objective_with):
    def model(_self, _config, train):
        return nn.Sequential(Standardize.fit(train.x), nn.Linear(13, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    run = _run(objective_with(model=model), ema_decay=0.5, lr=0.05)
    _step(run, range(20))
    expected = run.model[1].weight.detach().clone()
    for count in range(1, 4):
        _step(run, range(20 * count, 20 * count + 20))
        decay = min(0.5, (1 + count) / (10 + count))
        expected = decay * expected + (1 - decay) * run.model[1].weight.detach()
    torch.testing.assert_close(run.judged[1].weight, expected)
    assert run.judged is not run.model
    assert torch.equal(run.judged[2].running_mean, run.model[2].running_mean)
    assert torch.equal(run.judged[0].mean, run.model[0].mean)


def test_running_metrics_are_those_of_all_samples(wine):
    run = _run(wine, batch_size=8, lr=1e-12, drop_last=False, weight_decay=0.0)
    trained = train_epoch(run, 0)
    output = run.model(run.splits.train.x)
    assert trained.scores["loss"] == pytest.approx(float(run.loss(output.detach(), run.splits.train.y)), rel=1e-4)
    expected = float((output.detach().argmax(1) == run.splits.train.y).double().mean())
    assert trained.scores["accuracy"] == pytest.approx(expected)


def test_a_short_batch_is_kept_when_it_is_the_only_one(objective_with):
    def data(_self, seed):
        torch.manual_seed(seed)
        return Splits.make(torch.randn(30, 13), torch.arange(30) % 3, seed=seed)

    run = _run(objective_with(data=data), batch_size=64)
    assert train_epoch(run, 0).samples == 18


def test_the_gradient_may_be_clipped_by_value(wine):
    settings = {"optimizer": "sgd", "momentum": 0.0, "lr": 1.0, "weight_decay": 0.0, "clip_grad_norm": None}
    run = _run(wine, clip_grad_value=0.01, **settings)
    before = _weights(run)
    _, norm = _step(run, range(30))
    free = _run(wine, **settings)
    _, unclipped = _step(free, range(30))
    assert norm == unclipped
    gradient = before - _weights(free)
    torch.testing.assert_close(before - _weights(run), gradient.clamp(-0.01, 0.01))
    assert float(gradient.abs().max()) > 0.01


def _sam(objective, **settings):
    return _run(objective, optimizer="sam", base_optimizer="sgd", momentum=0.0, lr=0.5, sam_rho=0.3, **settings)


def test_sam_over_micro_batches_equals_sam_over_one_batch(wine):
    rows = list(range(40))
    whole, parts = (_sam(wine, clip_grad_norm=0.1) for _ in range(2))
    plain = _run(wine, optimizer="sgd", momentum=0.0, lr=0.5, clip_grad_norm=0.1)
    before = _weights(whole)
    loss, norm = _step(whole, rows)
    others = _step(parts, rows[:16], rows[16:32], rows[32:])
    torch.testing.assert_close(torch.stack([loss, norm]), torch.stack(others))
    torch.testing.assert_close(_weights(parts), _weights(whole))
    assert torch.equal(loss, _step(plain, rows)[0]), "the loss that is reported is that at the weights, not uphill"
    assert not torch.allclose(_weights(plain), _weights(whole))
    assert float((_weights(whole) - before).norm()) == pytest.approx(0.5 * 0.1, rel=0.1), "the step is clipped"


def test_a_step_of_sam_that_loss_scaling_skips_moves_nothing(wine):
    run = _sam(wine, precision="fp16", schedule="cosine", ema_decay=0.9, epochs=10)
    _step(run, range(8))
    run.model[1][2].weight.register_hook(lambda grad: torch.full_like(grad, math.inf))
    before = (_weights(run), run.schedule.taken, int(run.average.average.n_averaged))
    _step(run, range(8))
    assert torch.equal(_weights(run), before[0])
    assert (run.schedule.taken, int(run.average.average.n_averaged)) == before[1:]
    assert run.guard.skipped == 1
    assert not any("old_p" in state for state in run.optimizer.state.values())


def test_sam_counts_a_batch_once_in_batch_norm(objective_with):
    def model(_self, _config, _train):
        return nn.Sequential(nn.BatchNorm1d(13), nn.Linear(13, 3))

    runs = [_sam(objective_with(model=model)), _run(objective_with(model=model), optimizer="sgd", lr=0.5)]
    for run in runs:
        _step(run, range(20))
        _step(run, range(20, 40))
    sam, plain = (run.model[0] for run in runs)
    assert torch.equal(sam.running_mean, plain.running_mean)
    assert sam.momentum == plain.momentum == 0.1


def test_every_nth_step_is_noted_with_the_gradient_of_each_layer(wine):
    run = _run(wine, batch_size=16, log_every=4, clip_grad_norm=1e-3)
    seen = {}

    def spy(note):
        def noted(point, loss):
            seen[point.step] = {name: p.grad.norm().item() for name, p in run.model.named_parameters()}
            note(point, loss)

        return noted

    run.steplog.note = spy(run.steplog.note)
    for epoch in range(2):
        train_epoch(run, epoch)
    records = run.steplog.drain()
    assert [record["step"] for record in records] == [0, 4, 8]
    assert [record["epoch"] for record in records] == [0, 0, 1]
    for record in records:
        norms = seen[record["step"]]
        assert set(record["layers"]) == {"1.0", "1.2"}
        for layer, norm in record["layers"].items():
            assert norm == pytest.approx(math.hypot(norms[f"{layer}.weight"], norms[f"{layer}.bias"]), rel=1e-5)
        assert record["grad_norm"] == pytest.approx(math.hypot(*record["layers"].values()))
        assert record["grad_norm"] > 1e-3, "before clipping"
    assert run.steplog.drain() == []


def test_no_step_is_noted_unless_asked_for(wine):
    run = _run(wine, batch_size=16, log_every=None)
    train_epoch(run, 0)
    assert run.steplog.drain() == []


def test_a_validation_within_an_epoch_changes_nothing(wine):
    plain, watched = (_run(wine, batch_size=16, validate_every=every) for every in (None, 4))
    scores = [train_epoch(run, 0) for run in (plain, watched)]
    assert scores[0] == scores[1]
    assert torch.equal(_weights(plain), _weights(watched))
    within = [record for record in watched.steplog.drain() if "val_loss" in record]
    assert [(record["epoch"], record["step"]) for record in within] == [(0, 4)]
    assert within[0]["val_accuracy"] > 0


class _Reads:
    """Counts the calls that read a tensor from the device, and so wait for it."""

    NAMES = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__")

    def __init__(self, monkeypatch):
        self.calls = []
        for name in self.NAMES:
            monkeypatch.setattr(torch.Tensor, name, self._counted(name, getattr(torch.Tensor, name)))

    def _counted(self, name, original):
        def called(tensor, *args, **kwargs):
            if tensor.dtype.is_floating_point:  # the number of averages is kept on the CPU
                self.calls.append(name)
            return original(tensor, *args, **kwargs)

        return called


@pytest.mark.parametrize("settings", [{}, {"ema_decay": 0.9}, {"accumulate": 2}, {"optimizer": "sgd"}])
def test_an_epoch_waits_for_the_device_a_fixed_number_of_times(objective_with, monkeypatch, settings):
    """As many steps as there may be: the guard looks every 16, and the sums are read once."""

    def data(_self, seed):
        torch.manual_seed(seed)
        return Splits.make(torch.randn(2000, 13), torch.arange(2000) % 3, seed=seed)

    run = _run(objective_with(data=data), batch_size=8, log_every=10, precision="bf16", **settings)
    run.guard = FiniteGuard(torch.device("cuda"))  # as on an accelerator; the guard itself touches no device
    reads = _Reads(monkeypatch)
    trained = train_epoch(run, 0)
    run.steplog.drain()
    steps = trained.samples // (8 * run.config.accumulate)
    of_the_guard = -(-steps // 16)
    assert len(reads.calls) <= of_the_guard + 3, reads.calls
