"""Settings of several objectives: directions, constraints, and what may go with them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Direction = Literal["maximize", "minimize"]

# For several metrics: median compares one number, and where asha prunes tpe came to less than drawing at random does
# (benchmarks/search_quality).
USUAL = {"sampler": "curves", "pruner": "asha"}

_BOUND = re.compile(r"(<=|>=)\s*(\S+)")
_NAMED = re.compile(r"([^<>=]+?)\s*((?:<=|>=|<|>|=).*)")


@dataclass(frozen=True)
class Bound:
    """A bound on a metric.

    Attributes:
        metric: its name.
        sign: ``<=`` or ``>=``.
        limit: finite.
    """

    metric: str
    sign: str
    limit: float

    def __str__(self) -> str:
        """Returns it as it is given: ``model_mb <= 10``."""
        return f"{self.metric} {self.sign} {self.limit:g}"

    def told(self, value: float) -> str:
        """In words, of a value that is out of bounds: ``model_mb 12.5, not <= 10``."""
        return f"{self.metric} {value:.6g}, not {self.sign} {self.limit:g}"

    def violation(self, value: float) -> float:
        """By how much a value is out of bounds, as Optuna has it: positive where it is; infinite of a NaN."""
        if math.isnan(value):
            return math.inf
        return value - self.limit if self.sign == "<=" else self.limit - value


def bounds_of(constraints: Mapping[str, str]) -> tuple[Bound, ...]:
    """Return the bounds of constraints that were checked: ``{"model_mb": "<= 10"}``."""
    found = []
    for metric, text in constraints.items():
        match = _BOUND.fullmatch(text.strip())
        assert match is not None
        found.append(Bound(metric, match[1], float(match[2])))
    return tuple(found)


def constraints_given(given: Any) -> Any:
    """Return constraints as a table; a flag has them with commas between, and none is no setting.

    Raises:
        ValueError: one cannot be read; one line names it and says how it is written.
    """
    if isinstance(given, str):
        given = _named_bounds(given)
    if given is None or given == {}:
        return None
    if not isinstance(given, Mapping):
        raise ValueError(f"constraints is {given!r}: give a table of metrics and bounds, such as {{model_mb: '<= 10'}}")
    _once("constraints", given)
    return {_metric("constraints", metric): _bound(str(metric), text) for metric, text in given.items()}


def _named_bounds(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    if not text.strip(" ,"):
        raise ValueError("--constraints is empty: give METRIC<=NUMBER or METRIC>=NUMBER, or leave it out")
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _NAMED.fullmatch(part)
        if match is None:
            raise ValueError(f"--constraints {part!r}: write it as METRIC<=NUMBER or METRIC>=NUMBER")
        if match[1] in found:
            raise ValueError(f"--constraints: {match[1]} has two bounds: leave one out")
        found[match[1]] = match[2]
    return found


def _bound(metric: str, text: object) -> str:
    match = _BOUND.fullmatch(str(text).strip())
    try:
        limit = float(match[2]) if match else math.nan
    except ValueError:
        limit = math.nan
    if match is None or not math.isfinite(limit):
        raise ValueError(
            f"--constraints: {metric} {str(text).strip()!r} is no bound: write <= or >= and a number, such as '<= 10'"
        )
    return f"{match[1]} {limit!r}"


def directions_given(given: Any) -> Any:
    """Return directions as a table; a flag has them with commas between, and none is no setting.

    Raises:
        ValueError: they cannot be read, or one metric is there twice.
    """
    if isinstance(given, str):
        given = _named_ways(given)
    if given is None or given == {}:
        return None
    if not isinstance(given, Mapping):
        raise ValueError(
            f"directions is {given!r}: give a table of metrics and directions, such as {{accuracy: maximize, "
            "latency_ms: minimize}"
        )
    _once("directions", given)
    return {_metric("directions", metric): _way(str(metric), way) for metric, way in given.items()}


def _named_ways(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    if not text.strip(" ,"):
        raise ValueError("--directions is empty: give METRIC=maximize or METRIC=minimize, or leave it out")
    for part in filter(None, (part.strip() for part in text.split(","))):
        metric, sign, way = (word.strip() for word in part.partition("="))
        if not sign or not metric:
            raise ValueError(f"--directions {part!r}: write it as METRIC=maximize or METRIC=minimize")
        if metric in found:
            raise ValueError(f"--directions: {metric} is given two directions: leave one out")
        found[metric] = way
    return found


def _once(setting: str, given: Mapping[Any, Any]) -> None:
    names = [str(metric).strip() for metric in given]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"--{setting}: {twice} is there twice: leave one out")


def _metric(setting: str, metric: object) -> str:
    if not isinstance(metric, str) or not metric.strip():
        raise ValueError(f"--{setting}: {metric!r} names no metric")
    return metric.strip()


def _way(metric: str, way: object) -> str:
    if way not in ("maximize", "minimize"):
        raise ValueError(f"--directions: {metric}={way}: a direction is maximize or minimize")
    return str(way)


def metrics_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return settings in which `metric` and `direction` are those of the first of several.

    Of one metric there are not several.

    Raises:
        ValueError: they cannot be read, or `metric` is not the first of `directions`.
    """
    ways = directions_given(given.get("directions"))
    if ways is None:
        return given
    metric, way = next(iter(ways.items()))
    named = given.get("metric", metric)
    if named not in ways:
        raise ValueError(f"--metric {named!r} is none of --directions {', '.join(ways)}: leave --metric out")
    if named != metric:
        raise ValueError(
            f"--metric {named!r}: of several metrics the first chooses the epoch: put it first in --directions"
        )
    if given.get("direction", way) != way:
        raise ValueError(f"--direction {given['direction']}: --directions has {metric}={way}: leave --direction out")
    if len(ways) == 1:
        return {**given, "metric": metric, "direction": way, "directions": None}
    return {**given, "metric": metric, "direction": way, "directions": ways}
