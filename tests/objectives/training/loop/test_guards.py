"""Errors that end a run at once: non-finite numbers, and too little memory."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from hpsearch import DeviceMemoryError, NonFiniteError, TrainConfig
from hpsearch.objectives.training.loop.epoch import train_epoch
from hpsearch.objectives.training.loop.guards import FiniteGuard, StepPosition
from tests.objectives.training.support import Memory, built, fit, weights_of


class _Poisoned(nn.Module):
    """A loss that is NaN, or has a NaN gradient, at one call."""

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
def test_a_non_finite_step_ends_the_epoch_before_the_optimizer_step(objective_with, gradient):
    run = built(objective_with(loss=lambda *_: _Poisoned(9, gradient)), batch_size=16, lr=0.25)
    train_epoch(run, 0)  # 6 steps
    weights = []
    original = run.finite_guard.check
    run.finite_guard.check = lambda *args, **kwargs: (weights.append(weights_of(run)), original(*args, **kwargs))
    with pytest.raises(NonFiniteError) as caught:
        train_epoch(run, 1)
    error = caught.value
    assert (error.epoch, error.step, error.batch, error.lr) == (1, 8, 2, 0.25)
    assert math.isnan(error.grad_norm)
    what = "gradient norm is nan" if gradient else "loss is nan"
    assert str(error) == f"{what} at epoch 2, step 8, batch 2: learning rate 0.25, gradient norm nan"
    assert torch.equal(weights_of(run), weights[-1]), "the bad step was not taken"
    assert bool(torch.isfinite(weights_of(run)).all())


def test_an_accelerator_checks_steps_in_groups_and_names_the_first_bad_one():
    guard = FiniteGuard(torch.device("cuda"), every=4)  # the guard itself touches no device
    for step in range(3):
        loss = torch.tensor(math.inf if step == 1 else 1.0)
        guard.check(StepPosition(0, step, step, 0.1), loss, torch.tensor(2.0), scaled=False)
    with pytest.raises(NonFiniteError, match="loss is inf at epoch 1, step 1, batch 1"):
        guard.check(StepPosition(0, 3, 3, 0.1), torch.tensor(math.nan), torch.tensor(2.0), scaled=False)
    for step in range(9):  # loss scaling skips a step with an infinite gradient, which is no failure
        guard.check(StepPosition(0, step, step, 0.1), torch.tensor(1.0), torch.tensor(math.inf), scaled=True)
    guard.check(StepPosition(1, 4, 0, 0.1), torch.tensor(math.nan), torch.tensor(2.0), scaled=False)
    with pytest.raises(NonFiniteError, match="loss is nan at epoch 2, step 4"):
        guard.flush()
    guard.flush()


def test_a_divergence_is_an_error_with_its_location(objective_with, tmp_path):
    def model(_self, _config, _train):
        return nn.Sequential(nn.Linear(13, 16), nn.Linear(16, 3))  # raw inputs, up to 1,680

    session = Memory()
    config = TrainConfig(optimizer="sgd", lr=1e6, momentum=0.0, clip_grad_norm=None, weight_decay=0.0, batch_size=8)
    loss = objective_with(model=model, loss=lambda *_: nn.CrossEntropyLoss(label_smoothing=0.1))
    with pytest.raises(NonFiniteError, match=r"(loss|gradient norm) is (nan|inf) at epoch \d+, step \d+, batch") as e:
        fit(loss, config, session=session, run_dir=tmp_path, epochs=30)
    assert e.value.lr > 0
    assert all(np.isfinite(record.metrics["val_loss"]) for record in session.reported)


def test_a_non_finite_validation_loss_is_a_divergence(objective_with):
    class Loss(nn.CrossEntropyLoss):
        trained = False

        def forward(self, output, target):
            self.trained = self.trained or output.requires_grad
            loss = super().forward(output, target)
            return loss * torch.inf if self.trained and not output.requires_grad else loss

    with pytest.raises(NonFiniteError, match="val_loss is inf at epoch 1, step 2"):
        fit(objective_with(loss=lambda *_: Loss()))


def test_out_of_memory_is_an_error_of_its_own_with_the_configuration(objective_with):
    def model(_self, _config, _train):
        return nn.Sequential(nn.Linear(13, 1 << 40), nn.Linear(1 << 40, 3))

    config = TrainConfig(batch_size=16, model={"width": 1 << 40})
    with pytest.raises(DeviceMemoryError, match="out of memory on cpu with batch_size 16 and model") as caught:
        fit(objective_with(model=model), config)
    assert caught.value.config is config


def test_all_steps_of_an_epoch_are_checked_before_its_results_are_used(objective_with):
    """As on an accelerator, where steps are checked in groups. The last group must be checked too."""
    run = built(objective_with(loss=lambda *_: _Poisoned(5)), batch_size=16)
    run.finite_guard = FiniteGuard(torch.device("cuda"), every=1000)
    with pytest.raises(NonFiniteError, match="loss is nan at epoch 1, step 4, batch 4"):
        train_epoch(run, 0)


def test_no_mid_epoch_validation_follows_a_non_finite_step(objective_with):
    run = built(objective_with(loss=lambda *_: _Poisoned(3)), batch_size=16, validate_every=4)
    run.finite_guard = FiniteGuard(torch.device("cuda"), every=1000)
    with pytest.raises(NonFiniteError, match="step 2"):
        train_epoch(run, 0)
    assert [record for record in run.steplog.drain() if "val_loss" in record] == []
