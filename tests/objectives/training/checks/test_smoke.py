import itertools
import json
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hpsearch import ObjectiveError, TrainConfig, load_objective
from hpsearch.objectives.training.checks.smoke import run_smoke_test


@pytest.mark.parametrize("name", ["digits", "breast_cancer"])
def test_the_built_in_objectives_overfit_a_batch_however_slow_the_clock(name, monkeypatch):
    clock = SimpleNamespace(monotonic=itertools.count(0.0, 1000.0).__next__, thread_time=time.thread_time)
    monkeypatch.setattr("hpsearch.objectives.training.checks.smoke.time", clock)
    result = run_smoke_test(load_objective(name), seconds=600.0)
    assert result.passed
    assert result.losses[-1] <= result.target < result.losses[0]
    assert result.samples == 32
    assert result.reason == ""


def test_regularisation_is_off_during_the_smoke_test():
    config = TrainConfig(
        lr=1e-2,
        label_smoothing=0.4,
        weight_decay=1.0,
        ema_decay=0.999,
        gradient_accumulation_steps=4,
        schedule="step",
        decay_epochs=7,
        model={"kind": "mlp", "layers": 2, "width": 64, "dropout": 0.8},
    )
    assert run_smoke_test(load_objective("digits"), config).passed


@pytest.mark.soak
@pytest.mark.parametrize("lr", [1e-4, 0.5])
def test_a_bad_learning_rate_does_not_fail_the_smoke_test(lr):
    config = TrainConfig(lr=lr, model={"kind": "mlp", "layers": 1, "width": 32, "dropout": 0.0})
    assert run_smoke_test(load_objective("digits"), config, steps=600).passed


def _cut(_self, _config, _train):
    class Cut(nn.Sequential):
        def forward(self, x):
            hidden = self[0](x).detach() * 0.0  # the inputs never reach the output
            return self[1](hidden)

    return Cut(nn.Linear(13, 8), nn.Linear(8, 3))


def test_a_model_that_ignores_its_inputs_fails(objective_with):
    result = run_smoke_test(objective_with(model=_cut), steps=100)
    assert not result.passed
    assert "the loss of one batch is" in result.reason
    assert result.losses[-1] > 0.5


def test_a_non_finite_loss_fails_with_its_step(objective_with):
    class Loss(nn.CrossEntropyLoss):
        def forward(self, output, target):
            loss = super().forward(output, target)
            return loss * torch.nan if output.requires_grad else loss

    result = run_smoke_test(objective_with(loss=lambda *_: Loss()), steps=50)
    assert not result.passed
    assert "loss is nan at epoch 1, step 0" in result.reason


def test_the_result_is_stored_with_its_plot(wine, tmp_path):
    result = run_smoke_test(wine, steps=50)
    result.write(tmp_path / "deep")
    kept = json.loads((tmp_path / "deep" / "smoke.json").read_text())
    assert (kept["passed"], kept["losses"], kept["samples"]) == (result.passed, result.losses, 32)
    assert (tmp_path / "deep" / "smoke.png").read_bytes().startswith(b"\x89PNG")


def test_the_smoke_test_is_repeatable_and_does_not_change_the_process(wine):
    torch.manual_seed(1)
    expected = torch.rand(1).item()
    torch.manual_seed(1)
    assert run_smoke_test(wine, steps=50) == run_smoke_test(wine, steps=50)
    assert torch.rand(1).item() == expected
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_mistake_in_the_objective_is_reported(objective_with):
    with pytest.raises(ObjectiveError, match="no parameters to train"):
        run_smoke_test(objective_with(model=lambda *_: nn.Flatten()))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 6))])
def test_a_noisy_loss_does_not_hide_a_dead_output(objective_with, seed):
    """The noise alone lowers the loss by more than a tenth in some steps."""

    class Noisy(nn.Module):
        def forward(self, output, target):
            return (0 * output.sum(1) + 1 + torch.randn(len(target)).abs()).mean()

    result = run_smoke_test(objective_with(loss=lambda *_: Noisy(), loss_floor=None), seed=seed, steps=50)
    assert not result.passed
    assert result.losses[-1] == pytest.approx(result.losses[0])


def test_a_smoke_test_that_runs_out_of_time_is_undecided(objective_with):
    result = run_smoke_test(objective_with(model=_cut), seconds=0.0)
    assert (result.passed, result.is_undecided) == (False, True)
    assert len(result.losses) == 25, "a look after the first steps, and no other rate"
    assert "after 25 steps (time limit), not below 0.01" in result.reason


def test_the_curve_has_every_step(wine):
    """With plain SGD, so that the last loss can be computed by hand."""
    config = TrainConfig(optimizer="sgd", momentum=0.0, lr=0.1, clip_grad_norm=None)
    found = run_smoke_test(wine, config, steps=30)
    assert len(found.losses) == 30
    assert found.losses[0] > 2 * found.losses[-1]
    assert max(found.losses[i + 1] / found.losses[i] for i in range(29)) < 1, "it falls at every step"


class _Bound(nn.Module):
    """A loss with a lower bound of 40 or -40, like the bound of a VAE."""

    def __init__(self, least):
        super().__init__()
        self.least = least

    def forward(self, output, target):
        return nn.functional.cross_entropy(output, target, reduction="none") * 30 + self.least


@pytest.mark.soak
def test_loss_floor_is_subtracted_from_the_loss(objective_with):
    loss = {"loss": lambda *_: _Bound(40.0)}
    blamed = run_smoke_test(objective_with(**loss), steps=200)
    assert not blamed.passed
    assert blamed.reason.endswith("if no model can reach this loss, set loss_floor of the objective")
    assert run_smoke_test(objective_with(**loss, loss_floor=40.0), steps=400).passed
    assert run_smoke_test(objective_with(**loss, loss_floor=None), steps=200).passed
    assert not run_smoke_test(objective_with(**loss, loss_floor=40.0, model=_cut), steps=50).passed


def test_a_negative_loss_must_decrease_too(objective_with):
    loss = {"loss": lambda *_: _Bound(-80.0)}
    found = run_smoke_test(objective_with(**loss), steps=200)
    assert found.passed
    assert found.losses[-1] <= found.target < found.losses[0] < 0
    assert not run_smoke_test(objective_with(**loss, model=_stuck), steps=50).passed


def _stuck(_self, _config, _train):
    class Stuck(nn.Module):
        def __init__(self):
            super().__init__()
            self.unused = nn.Parameter(torch.zeros(3))

        def forward(self, x):
            return (0 * self.unused).expand(len(x), 3)

    return Stuck()


def test_all_five_rates_load_the_data_once(objective_with):
    calls = []

    def data(self, seed):
        calls.append(seed)
        return type(self).__mro__[1].data(self, seed)

    assert not run_smoke_test(objective_with(data=data, model=_cut), steps=5).passed
    assert calls == [0]
