import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from hpsearch import ObjectiveError, TrainConfig, Trainer
from hpsearch.objectives.training.config import SCHEDULES
from hpsearch.objectives.training.optimizers.schedules import _DECAYS, build_schedule, check_length

STEPS = 40


def _rates(config, steps=STEPS, extra=0, epoch_steps=1):
    """Return the rate of each optimizer step, per group."""
    weight, bias = nn.Linear(2, 2).parameters()
    groups = [{"params": [weight], "lr": config.lr}, {"params": [bias], "lr": config.lr / 10}]
    optimizer = torch.optim.SGD(groups, lr=config.lr)
    schedule = build_schedule(optimizer, config, steps, epoch_steps=epoch_steps)
    rates = []
    for _ in range(steps + extra):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return rates


def _torchs(make, steps=STEPS):
    """Return the rates of one of torch's schedules."""
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    theirs = make(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    return rates


def _first(config, **kwargs):
    return [rate for rate, _ in _rates(config, **kwargs)]


def test_cosine_warms_up_and_decays_by_its_formula():
    rates = _first(TrainConfig(lr=0.1, schedule="cosine", warmup_steps=8, min_lr_fraction=0.1))
    assert rates[:8] == pytest.approx([0.1 * (step + 1) / 8 for step in range(8)])
    fall = [0.1 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 32))) for step in range(32)]
    assert rates[8:] == pytest.approx(fall)
    assert rates[-10:] == sorted(set(rates[-10:]), reverse=True), "no floor flattens the tail"


def test_the_names_are_those_that_can_be_built():
    assert {*_DECAYS, "one_cycle", "plateau"} == set(SCHEDULES), "these two are built apart"


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_schedule_stays_in_bounds_and_keeps_the_ratio_of_groups(name):
    rates = _rates(TrainConfig(lr=0.1, schedule=name, warmup_fraction=0.1))
    assert all(0 < rate <= 0.1 + 1e-12 for rate, _ in rates)
    assert max(rate for rate, _ in rates) == pytest.approx(0.1, rel=0.05)
    assert all(rate == pytest.approx(10 * other) for rate, other in rates)
    jumps = [abs(after - before) for (before, _), (after, _) in pairwise(rates)]
    if name not in ("step", "cosine_restarts"):
        assert max(jumps) <= 0.1 / 4 + 1e-12


@pytest.mark.parametrize("name", ["cosine", "linear", "exponential", "one_cycle"])
def test_a_decaying_schedule_ends_low(name):
    assert _first(TrainConfig(lr=0.1, schedule=name))[-1] < 0.01


def test_one_cycle_equals_that_of_torch():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS, cycle_momentum=False)
    expected = []
    for step in range(STEPS):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step < STEPS - 1:
            theirs.step()
    assert _first(TrainConfig(lr=0.1, schedule="one_cycle")) == pytest.approx(expected)


def test_the_constant_schedule_is_constant():
    assert set(_first(TrainConfig(lr=0.1, schedule="constant", warmup_fraction=0.0))) == {0.1}


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_schedules_work_for_short_runs_and_steps_past_the_end(name, steps):
    rates = _first(TrainConfig(lr=0.1, schedule=name, warmup_steps=100), steps=steps, extra=3)
    assert all(0 <= rate <= 0.1 + 1e-12 for rate in rates)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_resumed_schedule_continues_exactly(name):
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


def test_step_equals_that_of_torch_in_epochs():
    config = TrainConfig(lr=0.1, schedule="step", decay_factor=0.5, decay_epochs=3, warmup_fraction=0.0)
    expected = _torchs(lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=12, gamma=0.5))
    assert _first(config, epoch_steps=4) == pytest.approx(expected)
    thirds = _first(TrainConfig(lr=0.1, schedule="step", warmup_fraction=0.0), steps=36, epoch_steps=4)
    assert thirds == pytest.approx([0.1] * 12 + [0.01] * 12 + [0.001] * 12)


def test_polynomial_equals_that_of_torch_with_a_final_rate():
    config = TrainConfig(lr=0.1, schedule="polynomial", power=2.5, warmup_fraction=0.0)
    theirs = _torchs(lambda optimizer: lr_scheduler.PolynomialLR(optimizer, STEPS, power=2.5))
    assert _first(config) == pytest.approx(theirs)
    floored = TrainConfig(lr=0.1, schedule="polynomial", power=2.5, warmup_fraction=0.0, min_lr_fraction=0.2)
    assert _first(floored) == pytest.approx([0.02 + 0.8 * rate for rate in theirs])


def test_cosine_restarts_equal_those_of_torch():
    config = TrainConfig(lr=0.1, schedule="cosine_restarts", cycles=4, warmup_fraction=0.0)
    expected = _torchs(lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=10))
    assert _first(config) == pytest.approx(expected)


def test_a_cosine_warm_up_starts_above_zero():
    rates = _first(TrainConfig(lr=0.1, schedule="constant", warmup="cosine", warmup_steps=8))
    assert rates[:8] == pytest.approx([0.05 * (1 - math.cos(math.pi * (step + 1) / 8)) for step in range(8)])
    assert rates[0] > 0


def _plateau(values, maximize, config, resume_at=None):
    """Return the rate of each epoch of 4 steps, for the validation metrics `values`."""

    def start():
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        return optimizer, build_schedule(optimizer, config, 100, epoch_steps=4, maximize=maximize)

    optimizer, schedule = start()
    rates = []
    for epoch, value in enumerate(values):
        if epoch == resume_at:
            saved = optimizer.state_dict(), schedule.state_dict()
            optimizer, schedule = start()
            optimizer.load_state_dict(saved[0])
            schedule.load_state_dict(saved[1])
        for _ in range(4):
            optimizer.step()
            schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
        schedule.end_epoch(value)
    return rates


@pytest.mark.parametrize("maximize", [True, False])
def test_plateau_lowers_the_rate_if_the_metric_does_not_improve(maximize):
    sign = 1 if maximize else -1
    values = [sign * value for value in (1, 2, 3, 3, 3, 3, 3, 4, 5)]
    config = TrainConfig(lr=0.1, schedule="plateau", decay_factor=0.5, plateau_patience=1, warmup_fraction=0.0)
    rates = _plateau(values, maximize, config)
    assert rates == pytest.approx([0.1] * 5 + [0.05] * 2 + [0.025] * 2)
    for epoch in range(1, len(values)):
        assert _plateau(values, maximize, config, resume_at=epoch) == rates


def test_plateau_warms_up_first_and_has_a_minimum():
    config = TrainConfig(
        lr=0.1, schedule="plateau", decay_factor=0.1, plateau_patience=0, warmup_steps=8, min_lr_fraction=0.05
    )
    # The rate after the fourth step of each epoch, for the next step. It does not decrease during the warm-up.
    assert _plateau([1] * 6, True, config) == pytest.approx([0.0625, 0.1, 0.1, 0.01, 0.005, 0.005])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_steps": 40}, r"warmup_steps must be below 40 \(all steps\), not 40"),
        ({"schedule": "step", "decay_epochs": 10}, r"decay_epochs must be below epochs \(10\), not 10"),
        ({"schedule": "cosine_restarts", "cycles": 41}, "cycles must be at most the run's 40 steps, not 41"),
    ],
)
def test_a_schedule_longer_than_the_run_is_rejected(settings, message):
    with pytest.raises(ObjectiveError, match=message):
        check_length(TrainConfig(**settings), total_steps=40, epoch_steps=4)


def test_unused_schedule_settings_are_not_checked_against_the_run():
    check_length(TrainConfig(decay_epochs=99, cycles=99), total_steps=40, epoch_steps=4)


def test_a_run_passes_the_metric_of_each_epoch_to_plateau(wine):
    config = TrainConfig(
        lr=1e-9, schedule="plateau", decay_factor=0.5, plateau_patience=0, warmup_fraction=0.0, weight_decay=0.0
    )
    history = Trainer(wine, config, epochs=5, seed=0).fit().history
    assert len({record.metrics["val_accuracy"] for record in history}) == 1, "nothing is learned at such a rate"
    assert [record.metrics["lr"] for record in history] == pytest.approx([1e-9, 1e-9, 5e-10, 2.5e-10, 1.25e-10])


def test_linear_and_exponential_follow_their_formulas():
    settings = {"lr": 0.1, "warmup_fraction": 0.0, "min_lr_fraction": 0.01}
    linear = _first(TrainConfig(schedule="linear", **settings))
    assert linear == pytest.approx([0.1 * (0.01 + 0.99 * (1 - step / STEPS)) for step in range(STEPS)])
    expected = _torchs(lambda optimizer: lr_scheduler.ExponentialLR(optimizer, gamma=0.01 ** (1 / STEPS)))
    assert _first(TrainConfig(schedule="exponential", **settings)) == pytest.approx(expected)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_schedules_change_only_the_learning_rate(name):
    """torch's OneCycleLR cycles the first beta by default."""
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=0.1, betas=(0.85, 0.99))
    schedule = build_schedule(optimizer, TrainConfig(lr=0.1, schedule=name), STEPS)
    for epoch in range(STEPS):
        optimizer.step()
        schedule.step()
        schedule.end_epoch(float(epoch))
        assert optimizer.param_groups[0]["betas"] == (0.85, 0.99)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [({"gradient_accumulation_steps": 2}, 3), ({"gradient_accumulation_steps": 4, "drop_last": False}, 2)],
)
def test_a_schedule_spans_the_actual_optimizer_steps(wine, settings, steps):
    """106 samples in batches of 16: six or seven micro-batches, so three or two optimizer steps an epoch."""
    config = TrainConfig(lr=0.1, schedule="linear", warmup_fraction=0.0, batch_size=16, **settings)
    history = Trainer(wine, config, epochs=4, seed=0).fit().history
    last_of_each = [0.1 * (1 - (steps * epoch + steps - 1) / (4 * steps)) for epoch in range(4)]
    assert [record.metrics["lr"] for record in history] == pytest.approx(last_of_each)


def test_a_step_schedule_lowers_the_rate_between_epochs(wine):
    config = TrainConfig(
        lr=0.1, schedule="step", decay_epochs=2, warmup_fraction=0.0, batch_size=16, gradient_accumulation_steps=2
    )
    history = Trainer(wine, config, epochs=5, seed=0).fit().history
    assert [record.metrics["lr"] for record in history] == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001])


class _Count:
    """A metric that improves, or worsens, by one at each computation."""

    def __init__(self, sign):
        self.sign, self.count = sign, 0

    def reset(self):
        pass

    def update(self, output, target):
        pass

    def compute(self):
        self.count += self.sign
        return {"count": self.count}

    def to(self, device):
        return self


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
def test_a_run_passes_the_direction_of_the_metric_to_plateau(objective_with, direction):
    config = TrainConfig(lr=0.1, schedule="plateau", plateau_patience=0, warmup_fraction=0.0, batch_size=16)
    rates = {}
    for sign in (1, -1):
        changed = {"metric": "count", "direction": direction, "metrics": lambda *_, sign=sign: _Count(sign)}
        history = Trainer(objective_with(**changed), config, epochs=4, seed=0).fit().history
        rates[sign] = [record.metrics["lr"] for record in history]
    better = 1 if direction == "maximize" else -1
    assert rates[better] == [0.1] * 4
    assert rates[-better] == pytest.approx([0.1, 0.1, 0.01, 0.001])


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_no_schedule_raises_the_rate_past_its_end(name):
    rates = _first(TrainConfig(lr=0.1, schedule=name), extra=STEPS)
    assert max(rates[STEPS:]) <= rates[STEPS - 1]
