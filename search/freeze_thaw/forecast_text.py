"""Forecasts of final values and reasons of suggestions as texts; unlike the forecasts' computation, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna.trial import FrozenTrial

SUGGESTION_REASON_KEY = "curves:chosen"  # trial system attribute with the reason of the suggestion
MIN_REPORTED_TRIALS = 8  # minimum number of trials with reported values for a forecast
_DIGITS, _MAX_DIGITS = 4, 8  # significant digits


@dataclass(frozen=True)
class Forecast:
    """Forecast of a trial's final value, in units of the metric.

    Attributes:
        value: expected best value of all epochs after the last epoch.
        low, high: bounds of the 90 % prediction interval of this value.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        value, between = format_forecast(None, self)[1:]
        return f"{value} ({between})"


def format_forecast(best: float | None, found: Forecast) -> tuple[str, str, str]:
    """Return best value so far, forecast and prediction interval as texts, with enough digits to distinguish them."""
    values = [found.value if best is None else best, found.value, found.low, found.high]
    digits = next((d for d in range(_DIGITS, _MAX_DIGITS) if _are_distinct(values, d)), _DIGITS)
    now, value, low, high = (f"{v:.{digits}g}" for v in values)
    return now, value, f"{low} to {high}" if low != high else f"all at {low}"


def _are_distinct(values: Sequence[float], digits: int) -> bool:
    return len({f"{v:.{digits}g}" for v in values}) == len(set(values))


def can_forecast(trials: Sequence[FrozenTrial], epochs: int) -> bool:
    """Return whether enough trials have reported values, and an unfinished trial has too; does not import torch."""
    if epochs < 2 or not any(t.intermediate_values for t in trials if not t.state.is_finished()):
        return False
    return sum(bool(t.intermediate_values) for t in trials) >= MIN_REPORTED_TRIALS


def format_suggestion_reason(note: Mapping[str, Any]) -> str:
    """Return a text for the stored reason of a suggestion, with the forecast of each metric."""
    origin = "best of many random candidates" if note["near"] is None else f"near trial {note['near']}"
    origin += f" of {note['of']}" if "of" in note else ""
    means, intervals = note["foreseen"], note["band"]
    if isinstance(means, list):
        return f"forecast {', '.join(map(_format_interval, means, intervals))}; {origin}"
    return f"forecast {_format_interval(means, intervals)}, best then {note['best']:.4g}; {origin}"


def _format_interval(value: float, interval: Sequence[float]) -> str:
    return f"{value:.4g} ({interval[0]:.4g} to {interval[1]:.4g})"
