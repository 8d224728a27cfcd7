"""SAM's two passes in the training loop: over micro-batches, clipped, scaled, with batch norm."""

import math

import pytest
import torch
from torch import nn

from tests.objectives.training.support import built, take_step, weights_of


def _sam(objective, **settings):
    return built(objective, optimizer="sam", base_optimizer="sgd", momentum=0.0, lr=0.5, sam_rho=0.3, **settings)


def test_sam_over_micro_batches_equals_sam_over_one_batch(wine):
    rows = list(range(40))
    whole, parts = (_sam(wine, clip_grad_norm=0.1) for _ in range(2))
    plain = built(wine, optimizer="sgd", momentum=0.0, lr=0.5, clip_grad_norm=0.1)
    before = weights_of(whole)
    loss, norm = take_step(whole, rows)
    others = take_step(parts, rows[:16], rows[16:32], rows[32:])
    torch.testing.assert_close(torch.stack([loss, norm]), torch.stack(others))
    torch.testing.assert_close(weights_of(parts), weights_of(whole))
    assert torch.equal(loss, take_step(plain, rows)[0]), "the loss that is reported is that at the weights, not uphill"
    assert not torch.allclose(weights_of(plain), weights_of(whole))
    assert float((weights_of(whole) - before).norm()) == pytest.approx(0.5 * 0.1, rel=0.1), "the step is clipped"


def test_a_sam_step_that_loss_scaling_skips_changes_no_state(wine):
    run = _sam(wine, precision="fp16", schedule="cosine", ema_decay=0.9, epochs=10)
    take_step(run, range(8))
    run.model[1][2].weight.register_hook(lambda grad: torch.full_like(grad, math.inf))
    before = (
        weights_of(run),
        run.schedule.state_dict()["steps"]["last_epoch"],
        int(run.weight_averaging.average.n_averaged),
    )
    take_step(run, range(8))
    assert torch.equal(weights_of(run), before[0])
    steps = run.schedule.state_dict()["steps"]["last_epoch"]
    assert (steps, int(run.weight_averaging.average.n_averaged)) == before[1:]
    assert run.finite_guard.skipped == 1
    assert not any("old_p" in state for state in run.optimizer.state.values())


def test_sam_updates_batch_norm_once_per_batch(objective_with):
    def model(_self, _config, _train):
        return nn.Sequential(nn.BatchNorm1d(13), nn.Linear(13, 3))

    runs = [_sam(objective_with(model=model)), built(objective_with(model=model), optimizer="sgd", lr=0.5)]
    for run in runs:
        take_step(run, range(20))
        take_step(run, range(20, 40))
    sam, plain = (run.model[0] for run in runs)
    assert torch.equal(sam.running_mean, plain.running_mean)
    assert sam.momentum == plain.momentum == 0.1
