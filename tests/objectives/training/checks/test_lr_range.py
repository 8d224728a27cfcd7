import itertools
import json

import pytest
import torch
from torch import nn

from objectives import ObjectiveError, load_objective
from objectives.training import Splits, TrainConfig, Trainer
from objectives.training.checks.lr_range import _judged, lr_range


def test_the_rate_climbs_by_one_factor_and_stops_when_the_loss_diverges(wine):
    result = lr_range(wine, lowest=1e-5, highest=100.0, steps=150)
    factors = [after / before for before, after in itertools.pairwise(result.rates)]
    assert factors == pytest.approx([factors[0]] * len(factors))
    assert result.rates[0] == pytest.approx(1e-5)
    assert len(result.rates) < 150
    assert result.losses[-1] > 4 * min(result.losses)
    assert result.rates[0] < result.suggestion < result.highest


def test_the_steepest_fall_is_suggested():
    """A loss that falls fastest at a known place of the logarithm of the rate."""
    rates = [10.0 ** (k / 10 - 5) for k in range(50)]
    losses = (2.0 - 1.0 / (1 + torch.exp(-(torch.arange(50.0) - 23)))).tolist()
    losses[40:] = [losses[39] + 0.1 * k for k in range(10)]
    found = _judged(rates, losses)
    assert found.suggestion == rates[23]
    assert found.highest == rates[39]


@pytest.mark.parametrize("name", ["digits", "breast_cancer"])
def test_a_suggested_rate_trains_well(name):
    objective = load_objective(name)
    default = objective.default_config()
    found = lr_range(objective)
    config = TrainConfig.from_dict({**default.to_dict(), "lr": found.suggestion})
    result = Trainer(objective, config, epochs=5, seed=0).fit()
    assert result.best_value > 0.95


def test_it_repeats_and_touches_neither_the_process_nor_a_model(objective_with):
    models = []

    def model(_self, _config, _train):
        models.append(nn.Linear(13, 3))
        return models[-1]

    objective = objective_with(model=model)
    torch.manual_seed(1)
    expected = torch.rand(1).item()
    torch.manual_seed(1)
    first = lr_range(objective, steps=60)
    assert torch.rand(1).item() == expected
    assert lr_range(objective, steps=60) == first
    assert len(models) == 2, "each test has a model of its own"


def test_groups_keep_the_ratio_of_their_rates(wine, monkeypatch):
    seen = []
    from objectives.training.checks import lr_range as module

    original = module.train_step

    def spy(run, window, point, running):
        seen.append([group["lr"] for group in run.optimizer.param_groups] + [point.lr])
        return original(run, window, point, running)

    monkeypatch.setattr(module, "train_step", spy)
    lr_range(wine, TrainConfig(layer_decay=0.5), steps=20)
    for *rates, lr in seen:
        assert rates == pytest.approx([0.5 * lr, 0.5 * lr, lr, lr])


def test_the_result_is_kept_with_its_plot(wine, tmp_path):
    result = lr_range(wine, steps=60)
    result.write(tmp_path)
    kept = json.loads((tmp_path / "lr-range.json").read_text())
    assert kept["suggestion"] == result.suggestion
    assert (tmp_path / "lr-range.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("settings", [{"lowest": 0.0}, {"lowest": 2.0, "highest": 1.0}, {"steps": 3}])
def test_a_range_that_is_none_is_refused(wine, settings):
    with pytest.raises(ObjectiveError, match="a range needs 0 < lowest < highest and at least 10 steps"):
        lr_range(wine, **settings)


def test_a_loss_that_never_falls_is_told(objective_with):
    def data(_self, seed):
        return Splits.make(torch.zeros(90, 13), torch.arange(90) % 3, seed=seed)  # nothing to learn from

    with pytest.raises(ObjectiveError, match="the loss fell at no learning rate"):
        lr_range(objective_with(data=data, model=lambda *_: _Even()), steps=30)


class _Even(nn.Module):
    """Starts at the best there is: even odds."""

    def __init__(self):
        super().__init__()
        self.odds = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return self.odds.expand(len(x), 3)
