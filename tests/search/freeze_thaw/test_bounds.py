"""Forecasts and expected gains stay within a metric's range, and are printed with enough digits to differ."""

from __future__ import annotations

import math

import numpy as np
import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpsearch.search.freeze_thaw.forecast import forecast_final_values
from hpsearch.search.freeze_thaw.forecast_text import Forecast, format_forecast
from hpsearch.search.freeze_thaw.metric_bounds import get_loss_bound
from hpsearch.search.study.terminator import RemainingBudget, compute_expected_gain
from tests.factories import X

LEFT = RemainingBudget(trials=500, epochs=4)


def searched(best: float, *, direction: str, spread: float = 0.05) -> optuna.Study:
    """Return a study of eight parameters with too few trials to have found the best; no value is better than `best`."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study, random = optuna.create_study(direction=direction), np.random.default_rng(0)
    losses = []
    for number in range(30):
        params = {f"x{place}": float(random.random()) for place in range(8)}
        losses.append(spread * sum((x - 0.5) ** 2 for x in params.values()))
        end = best + (losses[-1] - min(losses)) * (1 if direction == "minimize" else -1)
        away = 0.2 if direction == "minimize" else -0.2
        kind = {"params": params, "distributions": dict.fromkeys(params, X)}
        waits = number % 3 == 2
        values = {0: end + away} if waits else {0: end + away, 1: end + away / 2, 2: end + away / 4, 3: end}
        state = {"state": TrialState.WAITING} if waits else {"state": TrialState.COMPLETE, "value": end}
        study.add_trial(create_trial(**kind, **state, intermediate_values=values))
    return study


@pytest.mark.parametrize(
    ("metric", "direction", "best", "most"),
    [
        ("accuracy", "maximize", 0.9995, 0.0005),
        ("r2", "maximize", 0.9995, 0.0005),
        ("accuracy", "maximize", 1.0, 0.0),
        ("loss", "minimize", 0.0005, 0.0005),
        ("mae", "minimize", 0.0005, 0.0005),
    ],
)
def test_the_expected_gain_is_limited_by_the_bound_of_the_metric(
    metric: str, direction: str, best: float, most: float
) -> None:
    study = searched(best, direction=direction)
    gain = compute_expected_gain(study, LEFT, seed=0, metric=metric)
    assert gain == pytest.approx(most, abs=1e-12)
    unbounded = compute_expected_gain(study, LEFT, seed=0, metric="of somebody's own")
    assert unbounded is not None
    assert unbounded > 0.0005


@pytest.mark.parametrize(
    ("metric", "best", "maximize", "least"),
    [
        ("accuracy", -0.9, True, -1.0),
        ("accuracy", -93.0, True, -math.inf),  # a percentage
        ("accuracy", 0.1, False, -math.inf),
        ("rmse", 0.1, False, 0.0),
        ("loss", -3.0, False, -math.inf),  # for example a negative log likelihood
        ("psnr", -20.0, True, -math.inf),
    ],
)
def test_a_metric_with_values_beyond_its_bound_has_no_bound(metric, best, maximize, least) -> None:
    assert get_loss_bound(metric, best, maximize=maximize) == least


def test_an_interval_ends_at_the_bound_of_the_metric() -> None:
    random, trials = np.random.default_rng(1), []
    for number in range(24):
        x = float(random.random())
        waits = x > 0.7  # the best
        end = 0.999 - 3 * (1 - x) ** 2
        values = [end - 3, end - 1] if waits else [end - 3, end - 1, end - 0.3, end]
        state = TrialState.WAITING if waits else TrialState.COMPLETE
        trials.append(
            FrozenTrial(
                number=number, params={"x": x}, distributions={"x": X}, state=state, value=None, trial_id=number,
                intermediate_values=dict(enumerate(values)), datetime_start=None, datetime_complete=None,
                user_attrs={}, system_attrs={},
            )
        )  # fmt: skip
    known = forecast_final_values(trials, epochs=4, maximize=True, metric="r2")
    assert known
    assert max(found.high for found in known.values()) <= 1
    other = forecast_final_values(trials, epochs=4, maximize=True, metric="of somebody's own")
    assert max(found.high for found in other.values()) > 1


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Forecast(0.5, 0.25, 0.75), "0.5 (0.25 to 0.75)"),
        (Forecast(0.99997, 0.99996, 1.0), "0.99997 (0.99996 to 1)"),
        (Forecast(1.0, 1.0, 1.0), "1 (all at 1)"),
        (Forecast(0.1 + 0.2, 0.3, 0.4), "0.3 (0.3 to 0.4)"),  # different only by rounding
    ],
)
def test_forecasts_are_printed_with_enough_digits_to_differ(found: Forecast, words: str) -> None:
    assert str(found) == words


def test_rounding_does_not_hide_a_difference_from_the_best() -> None:
    assert format_forecast(0.99996, Forecast(1.0, 0.99996, 1.0)) == ("0.99996", "1", "0.99996 to 1")
