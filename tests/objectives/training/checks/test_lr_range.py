import itertools
import json

import pytest
import torch
from torch import nn

from hpsearch import ObjectiveError, Splits, TrainConfig, Trainer, load_objective
from hpsearch.objectives.training.checks.lr_range import _suggest_lr, run_lr_range_test


@pytest.mark.slow
def test_the_rate_grows_geometrically_until_the_loss_diverges(wine):
    result = run_lr_range_test(wine, lowest=1e-5, highest=100.0, steps=150)
    factors = [after / before for before, after in itertools.pairwise(result.rates)]
    assert factors == pytest.approx([factors[0]] * len(factors))
    assert result.rates[0] == pytest.approx(1e-5)
    assert len(result.rates) < 150
    assert result.losses[-1] > 4 * min(result.losses)
    assert result.rates[0] < result.suggestion < result.highest


def test_the_rate_of_the_steepest_descent_is_suggested():
    """Return losses with the steepest descent at a known log learning rate."""
    rates = [10.0 ** (k / 10 - 5) for k in range(50)]
    losses = (2.0 - 1.0 / (1 + torch.exp(-(torch.arange(50.0) - 23)))).tolist()
    losses[40:] = [losses[39] + 0.1 * k for k in range(10)]
    found = _suggest_lr(rates, losses)
    assert found.suggestion == rates[23]
    assert found.highest == rates[39]


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("digits", marks=pytest.mark.soak), "breast_cancer"])
def test_a_suggested_rate_trains_well(name):
    objective = load_objective(name)
    default = objective.default_config()
    found = run_lr_range_test(objective)
    config = TrainConfig.from_dict({**default.to_dict(), "lr": found.suggestion})
    result = Trainer(objective, config, epochs=5, seed=0).fit()
    assert result.best_value > 0.95


def test_the_range_test_is_repeatable_and_changes_neither_process_nor_model(objective_with):
    models = []

    def model(_self, _config, _train):
        models.append(nn.Linear(13, 3))
        return models[-1]

    objective = objective_with(model=model)
    torch.manual_seed(1)
    expected = torch.rand(1).item()
    torch.manual_seed(1)
    first = run_lr_range_test(objective, steps=60)
    assert torch.rand(1).item() == expected
    assert run_lr_range_test(objective, steps=60) == first
    assert len(models) == 2, "each test has a model of its own"


def test_groups_keep_the_ratio_of_their_rates(wine, monkeypatch):
    seen = []
    from hpsearch.objectives.training.checks import lr_range as module

    original = module.train_step

    def spy(run, window, point, running):
        seen.append([group["lr"] for group in run.optimizer.param_groups] + [point.lr])
        return original(run, window, point, running)

    monkeypatch.setattr(module, "train_step", spy)
    run_lr_range_test(wine, TrainConfig(layer_decay=0.5), steps=20)
    for *rates, lr in seen:
        assert rates == pytest.approx([0.5 * lr, 0.5 * lr, lr, lr])


def test_the_result_is_stored_with_its_plot(wine, tmp_path):
    result = run_lr_range_test(wine, steps=60)
    result.write(tmp_path)
    kept = json.loads((tmp_path / "lr-range.json").read_text())
    assert kept["suggestion"] == result.suggestion
    assert (tmp_path / "lr-range.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("settings", [{"lowest": 0.0}, {"lowest": 2.0, "highest": 1.0}, {"steps": 3}])
def test_an_invalid_range_is_rejected(wine, settings):
    with pytest.raises(ObjectiveError, match="the learning-rate range test needs 0 < lowest < highest and steps >= 10"):
        run_lr_range_test(wine, **settings)


def test_a_loss_that_never_decreases_is_reported(objective_with):
    def data(_self, seed):
        return Splits.make(torch.zeros(90, 13), torch.arange(90) % 3, seed=seed)  # nothing to learn from

    with pytest.raises(ObjectiveError, match="no learning rate reduces the loss"):
        run_lr_range_test(objective_with(data=data, model=lambda *_: _Even()), steps=30)


class _Even(nn.Module):
    """Starts at the optimum: equal probabilities."""

    def __init__(self):
        super().__init__()
        self.odds = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return self.odds.expand(len(x), 3)


def _noisy(_self, seed):
    """Ten input columns that explain a tenth of the target's variance."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 13, generator=generator)
    return Splits.make(x, x[:, :10].sum(dim=1) + 9 * torch.randn(400, generator=generator), seed=seed)


def _line(*_):
    return nn.Linear(13, 1)


@pytest.mark.parametrize("seed", range(5))
def test_differences_between_batches_do_not_hide_the_descent(objective_with, seed):
    """The noise of the loss of small batches is as large as the loss. The rate is correct within half a decade."""
    objective = objective_with(data=_noisy, model=_line, metric="rmse", direction="minimize")
    found = run_lr_range_test(objective, TrainConfig(batch_size=4), seed=seed, steps=100)
    assert 3e-3 < found.suggestion < 1.0
    assert len(found.rates) > 50


class _Density(nn.Module):
    """The negative log density of a normal distribution with a learned width, which is negative for small widths."""

    def forward(self, output, target):
        mean, log_width = output[:, 0], output[:, 1] - 3
        return log_width + 0.5 * ((target - mean) / log_width.exp()) ** 2


def test_a_negative_loss_does_not_stop_the_range_test(objective_with):
    def data(_self, seed):
        x = torch.randn(300, 13, generator=torch.Generator().manual_seed(0))
        return Splits.make(x, 0.01 * x[:, 0], seed=seed)

    objective = objective_with(
        data=data, model=lambda *_: _Narrow(), loss=lambda *_: _Density(), metric="loss", direction="minimize",
    )  # fmt: skip
    found = run_lr_range_test(objective, steps=100)
    assert found.losses[0] < 0
    assert len(found.rates) > 30
    assert found.rates[0] < found.suggestion < found.highest
    assert min(found.losses) < found.losses[0] - 0.1


class _Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(13, 2)
        nn.init.zeros_(self.net.weight)
        nn.init.zeros_(self.net.bias)

    def forward(self, x):
        return self.net(x)


def test_a_loss_that_is_too_noisy_for_a_suggestion_is_an_error():
    noise = torch.randn(100, generator=torch.Generator().manual_seed(0))
    losses = (5 + noise).tolist()
    losses[0] = 6.0
    with pytest.raises(ObjectiveError, match="no learning rate can be suggested, because the loss falls by only"):
        _suggest_lr([10.0 ** (k / 20 - 5) for k in range(100)], losses)
