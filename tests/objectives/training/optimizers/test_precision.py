"""Mixed precision: the types of computations, and the state after a skipped step."""

import math

import pytest
import torch
from torch import nn

from hpsearch import NonFiniteError
from hpsearch.objectives.training.loop.epoch import train_epoch
from tests.objectives.training.support import built, take_step, weights_of


def test_bf16_runs_without_a_scaler_and_the_loss_is_in_fp32(objective_with):
    seen = []

    class Loss(nn.CrossEntropyLoss):
        def forward(self, output, target):
            seen.append(output.dtype)
            return super().forward(output, target)

    run = built(objective_with(loss=lambda *_: Loss()), precision="bf16")
    types = []
    run.model[1][0].register_forward_hook(lambda _m, _i, output: types.append(output.dtype))
    take_step(run, range(8))
    assert types == [torch.bfloat16]
    assert set(seen) == {torch.float32}
    assert not run.precision.scaled
    assert all(p.dtype == torch.float32 for p in run.model.parameters())


def test_a_step_that_loss_scaling_skips_changes_no_state(wine):
    run = built(wine, precision="fp16", schedule="cosine", ema_decay=0.9, epochs=10)
    take_step(run, range(8))
    handle = run.model[1][2].weight.register_hook(lambda grad: torch.full_like(grad, math.inf))
    before = (
        weights_of(run),
        run.schedule.state_dict()["steps"]["last_epoch"],
        int(run.weight_averaging.average.n_averaged),
        run.precision.scaler.get_scale(),
    )
    state = {k: v["exp_avg"].clone() for k, v in run.optimizer.state_dict()["state"].items()}
    take_step(run, range(8))
    assert torch.equal(weights_of(run), before[0])
    assert all(torch.equal(v["exp_avg"], state[k]) for k, v in run.optimizer.state_dict()["state"].items())
    steps = run.schedule.state_dict()["steps"]["last_epoch"]
    assert (steps, int(run.weight_averaging.average.n_averaged)) == before[1:3]
    assert run.precision.scaler.get_scale() == before[3] / 2
    assert run.finite_guard.skipped == 1
    handle.remove()
    take_step(run, range(8))
    assert run.finite_guard.skipped == 0
    assert run.schedule.state_dict()["steps"]["last_epoch"] == before[1] + 1
    assert not torch.equal(weights_of(run), before[0])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "sam"])
def test_a_skipped_first_step_leaves_no_optimizer_state(wine, optimizer):
    """Optimizers create their state at the first step, and some use uninitialized memory that a real step fills."""
    settings = {"optimizer": optimizer, "base_optimizer": "sgd", "precision": "fp16", "lr": 0.1}
    skipping, plain = (built(wine, **settings) for _ in range(2))
    with torch.no_grad():  # memory that the allocator reuses is not zero
        garbage = [torch.full_like(p, 1e30) for p in skipping.model.parameters()]
    del garbage
    handle = skipping.model[1][2].weight.register_hook(lambda grad: torch.full_like(grad, math.inf))
    take_step(skipping, range(8))
    assert skipping.finite_guard.skipped == 1
    handle.remove()
    for run in (skipping, plain):
        run.precision.scaler.load_state_dict({**run.precision.scaler.state_dict(), "scale": 1024.0})
        for start in range(0, 48, 8):
            take_step(run, range(start, start + 8))
    torch.testing.assert_close(weights_of(skipping), weights_of(plain), rtol=1e-2, atol=1e-3)


def test_the_state_of_loss_scaling_is_saved(wine):
    run = built(wine, precision="fp16")
    run.model[1][2].weight.register_hook(lambda grad: torch.full_like(grad, math.inf))
    for _ in range(3):
        take_step(run, range(8))
    state = {**run.state_dict(), "best": {}, "history": []}
    other = built(wine, precision="fp16")
    other.load_state_dict(state)
    assert other.precision.scaler.get_scale() == run.precision.scaler.get_scale() == 65536 / 8
    assert other.finite_guard.skipped == 3


def test_endless_skipping_of_steps_is_a_divergence(wine):
    run = built(wine, precision="fp16")
    run.model[1][2].weight.register_hook(lambda grad: torch.full_like(grad, math.inf))
    for _ in range(9):
        take_step(run, range(8))
    with pytest.raises(NonFiniteError, match="10 consecutive steps had an infinite gradient"):
        take_step(run, range(8))


def test_fp16_learns(wine):
    run = built(wine, precision="fp16", lr=0.02, batch_size=16)
    losses = [train_epoch(run, epoch).scores["loss"] for epoch in range(6)]
    assert losses[-1] < 0.3 * losses[0]


def test_the_gradient_under_loss_scaling_is_unscaled(wine):
    """AdamW's steps do not depend on the scale, so they would hide a wrong one. The norm shows it."""
    norms = [
        float(take_step(built(wine, precision=name, clip_grad_norm=None), range(40))[1]) for name in ("fp32", "fp16")
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-2)


def test_loss_scaling_preserves_gradients_below_the_fp16_range(objective_with):
    """fp16 has no positive numbers below 6e-8. Loss scaling lifts the gradients above it."""

    class Faint(nn.CrossEntropyLoss):
        def forward(self, output, target):
            return 1e-7 * super().forward(output, target)

    run = built(objective_with(loss=lambda *_: Faint()), precision="fp16", clip_grad_norm=None)
    _, norm = take_step(run, range(40))
    true = built(objective_with(loss=lambda *_: Faint()), clip_grad_norm=None)
    assert float(norm) == pytest.approx(float(take_step(true, range(40))[1]), rel=0.02)
