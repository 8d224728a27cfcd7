import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from objectives.training import TrainConfig
from objectives.training.schedules import SCHEDULES, build_schedule

STEPS = 40


def _rates(config, steps=STEPS, extra=0):
    """The rate that each optimizer step used, per group."""
    weight, bias = nn.Linear(2, 2).parameters()
    groups = [{"params": [weight], "lr": config.lr}, {"params": [bias], "lr": config.lr / 10}]
    optimizer = torch.optim.SGD(groups, lr=config.lr)
    schedule = build_schedule(optimizer, config, steps)
    rates = []
    for _ in range(steps + extra):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return rates


def _first(config, **kwargs):
    return [rate for rate, _ in _rates(config, **kwargs)]


def test_cosine_climbs_then_falls_along_the_formula():
    rates = _first(TrainConfig(lr=0.1, schedule="cosine", warmup_steps=8, min_lr_fraction=0.1))
    assert rates[:8] == pytest.approx([0.1 * (step + 1) / 8 for step in range(8)])
    fall = [0.1 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 32))) for step in range(32)]
    assert rates[8:] == pytest.approx(fall)
    assert rates[-10:] == sorted(set(rates[-10:]), reverse=True), "no floor flattens the tail"


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_schedule_keeps_its_bounds_and_the_ratio_of_groups(name):
    rates = _rates(TrainConfig(lr=0.1, schedule=name, warmup_fraction=0.1))
    assert all(0 < rate <= 0.1 + 1e-12 for rate, _ in rates)
    assert max(rate for rate, _ in rates) == pytest.approx(0.1, rel=0.05)
    assert all(rate == pytest.approx(10 * other) for rate, other in rates)
    jumps = [abs(after - before) for (before, _), (after, _) in pairwise(rates)]
    assert max(jumps) <= 0.1 / 4 + 1e-12


@pytest.mark.parametrize("name", ["cosine", "linear", "exponential", "one_cycle"])
def test_a_decaying_schedule_ends_low(name):
    assert _first(TrainConfig(lr=0.1, schedule=name))[-1] < 0.01


def test_one_cycle_is_that_of_torch():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS, cycle_momentum=False)
    expected = []
    for step in range(STEPS):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step < STEPS - 1:
            theirs.step()
    assert _first(TrainConfig(lr=0.1, schedule="one_cycle")) == pytest.approx(expected)


def test_constant_stays():
    assert set(_first(TrainConfig(lr=0.1, schedule="constant", warmup_fraction=0.0))) == {0.1}


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_short_runs_and_steps_past_the_end_do_no_harm(name, steps):
    rates = _first(TrainConfig(lr=0.1, schedule=name, warmup_steps=100), steps=steps, extra=3)
    assert all(0 <= rate <= 0.1 + 1e-12 for rate in rates)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_resumed_schedule_goes_on_exactly(name):
    config = TrainConfig(lr=0.1, schedule=name, warmup_fraction=0.2)
    whole = _first(config)

    def start():
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=config.lr)
        return optimizer, build_schedule(optimizer, config, STEPS)

    optimizer, schedule = start()
    for _ in range(13):
        optimizer.step()
        schedule.step()
    saved = optimizer.state_dict(), schedule.state_dict()
    optimizer, schedule = start()
    optimizer.load_state_dict(saved[0])
    schedule.load_state_dict(saved[1])
    rest = []
    for _ in range(STEPS - 13):
        rest.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rest == whole[13:]
