"""Forecasts for running and waiting trials: nine of ten final values are in their intervals, which are narrow."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.freeze_thaw.forecast import MAX_FORECASTS, forecast_final_values
from hpsearch.search.freeze_thaw.forecast_text import MIN_REPORTED_TRIALS
from hpsearch.storage.attributes import INFEASIBLE
from tests.factories import X

EPOCHS = 27
RUNGS = (1, 3, 9)


def trial(number: int, params: dict[str, float], values: list[float], state: TrialState, **attrs: bool) -> FrozenTrial:
    distributions: dict[str, BaseDistribution] = dict.fromkeys(params, X)
    kind = {"state": state, "value": None, "datetime_start": None, "datetime_complete": None, "trial_id": number}
    attributes = {"user_attrs": attrs, "system_attrs": {}, "intermediate_values": dict(enumerate(values))}
    return FrozenTrial(number=number, params=dict(params), distributions=distributions, **kind, **attributes)


def family(seed: int, count: int) -> tuple[list[dict[str, float]], np.ndarray]:
    """Return configurations, and noisy losses [count, epochs] whose limits and speeds depend on them."""
    random = np.random.default_rng(seed)
    x = random.random((count, 3))
    end = 0.1 + 2 * (x[:, 0] - 0.6) ** 2 + (x[:, 1] - 0.3) ** 2 + 0.02 * random.standard_normal(count)
    fall = (1 + x[:, :1]) * np.arange(1, EPOCHS + 1) ** -(0.3 + 1.2 * x[:, 2:])
    return [{f"x{j}": float(v) for j, v in enumerate(row)} for row in x], (
        end[:, None] + fall + 0.02 * random.standard_normal((count, EPOCHS))
    )


def promoted(params: list[dict[str, float]], losses: np.ndarray) -> list[FrozenTrial]:
    """Return the trials of a study in which all trials have started and one in three was promoted at each rung."""
    done = np.ones(len(losses), int)
    for rung, following in zip(RUNGS, (*RUNGS[1:], EPOCHS), strict=True):
        there = np.flatnonzero(done == rung)
        best = there[np.argsort(losses[there, :rung].min(1))][: math.ceil(len(there) / 3)]
        done[best] = following
        done[best[2::4]] = (rung + following) // 2  # runs between two rungs
    return [trial(i, params[i], losses[i, :n].tolist(), state_after(int(n))) for i, n in enumerate(done)]


def state_after(epochs: int) -> TrialState:
    if epochs == EPOCHS:
        return TrialState.COMPLETE
    return TrialState.WAITING if epochs in RUNGS else TrialState.RUNNING


def forecasts(seeds: int) -> Iterator[tuple[float, float, float, float, float]]:
    """Yield per trial: the forecast, its interval, the final value, and the value at the time of the forecast."""
    for seed in range(seeds):
        params, losses = family(seed, 60)
        trials = promoted(params, losses)
        for i in range(10):  # complete trials, as at the start of a study
            trials[i] = trial(i, params[i], losses[i].tolist(), TrialState.COMPLETE)
        for number, found in forecast_final_values(trials, epochs=EPOCHS, maximize=False).items():
            now = min(trials[number].intermediate_values.values())
            yield found.value, found.low, found.high, losses[number].min(), now


def test_forecast_intervals_have_their_coverage_and_beat_the_current_value():
    value, low, high, end, now = np.array(list(forecasts(6))).T
    assert len(value) > 200
    assert 0.82 <= np.mean((low <= end) & (end <= high)) <= 0.98
    assert np.median(abs(value - end)) < 0.3 * np.median(abs(now - end))
    assert (low <= value).all()
    assert (value <= high).all()
    assert (high <= now).all()  # the best value so far is a bound


def test_forecasts_are_symmetric_in_the_direction():
    params, losses = family(0, 30)
    one = forecast_final_values(promoted(params, losses), epochs=EPOCHS, maximize=False)
    turned = [
        trial(t.number, t.params, [-v for v in t.intermediate_values.values()], t.state)
        for t in promoted(params, losses)
    ]
    other = forecast_final_values(turned, epochs=EPOCHS, maximize=True)
    assert one.keys() == other.keys() != set()
    for number, found in other.items():
        same = one[number]
        assert (found.value, found.low, found.high) == pytest.approx((-same.value, -same.high, -same.low))


def test_forecasts_are_repeatable_and_possible_for_one_trial():
    trials = promoted(*family(1, 90))
    found = forecast_final_values(trials, epochs=EPOCHS, maximize=False)
    assert found == forecast_final_values(trials, epochs=EPOCHS, maximize=False)
    assert len(found) == MAX_FORECASTS
    assert {t.number for t in trials if t.state == TrialState.RUNNING} <= found.keys()
    left = next(t.number for t in trials if t.state == TrialState.WAITING and t.number not in found)
    assert forecast_final_values(trials, epochs=EPOCHS, maximize=False, of={left}).keys() == {left}


def test_forecasts_work_with_conditional_parameters_and_nan():
    kinds, trials = CategoricalDistribution(["a", "b"]), []
    params, losses = family(2, 20)
    for each in promoted(params, losses):
        each.params["kind"], each.distributions["kind"] = "ab"[each.number % 2], kinds
        if each.number % 2:
            del each.params["x1"], each.distributions["x1"]
        if each.number == 2:
            each.intermediate_values[0] = math.nan
        trials.append(each)
    number = len(trials)
    trials += [
        trial(number, params[0], [math.nan] * 2, TrialState.RUNNING),
        trial(number + 1, params[1], [math.inf], TrialState.PRUNED, **{INFEASIBLE: True}),
        trial(number + 2, params[2], [], TrialState.RUNNING),
        trial(number + 3, params[3], [0.0], TrialState.FAIL),
        trial(number + 4, {}, [0.5], TrialState.WAITING),
    ]
    found = forecast_final_values(trials, epochs=EPOCHS, maximize=False)
    assert found
    assert max(found) < number
    assert all(math.isfinite(x) for each in found.values() for x in (each.value, each.low, each.high))


def test_no_forecast_for_few_trials_or_without_unfinished_ones():
    trials = promoted(*family(3, MIN_REPORTED_TRIALS))
    assert forecast_final_values(trials, epochs=EPOCHS, maximize=False)
    assert not forecast_final_values(trials[1:], epochs=EPOCHS, maximize=False)
    ended = [t for t in promoted(*family(3, 40)) if t.state.is_finished()]
    assert not forecast_final_values(ended * 8, epochs=EPOCHS, maximize=False)


def test_the_forecast_of_identical_trials_is_their_current_value():
    trials = [trial(i, {"x": i / 9}, [0.5, 0.5], TrialState.WAITING) for i in range(9)]
    for found in forecast_final_values(trials, epochs=EPOCHS, maximize=True).values():
        assert (found.value, found.low, found.high) == (0.5, 0.5, 0.5)
