"""Settings of several objectives: directions, constraints, and what may go with them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

Direction = Literal["maximize", "minimize"]

# For several metrics: median compares one number, and where asha prunes tpe came to less than drawing at random does
# (benchmarks/search_quality).
MULTI_OBJECTIVE_DEFAULTS = {"sampler": "freeze_thaw", "pruner": "asha"}

_BOUND = re.compile(r"(<=|>=)\s*(\S+)")
_NAMED_BOUND = re.compile(r"([^<>=]+?)\s*((?:<=|>=|<|>|=).*)")
_NAMED_DIRECTION = re.compile(r"([^=]+?)\s*=\s*(.*)")


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

    def format_violation(self, value: float) -> str:
        """In words, of a value that is out of bounds: ``model_mb 12.5, not <= 10``."""
        return f"{self.metric} {value:.6g}, not {self.sign} {self.limit:g}"

    def violation(self, value: float) -> float:
        """By how much a value is out of bounds, as Optuna has it: positive where it is; infinite of a NaN."""
        if math.isnan(value):
            return math.inf
        return value - self.limit if self.sign == "<=" else self.limit - value


def make_bounds(constraints: Mapping[str, str]) -> tuple[Bound, ...]:
    """Return the bounds of constraints that were checked: ``{"model_mb": "<= 10"}``."""
    parts = ((metric, *text.split()) for metric, text in constraints.items())
    return tuple(Bound(metric, sign, float(limit)) for metric, sign, limit in parts)


def parse_constraints(given: Any) -> dict[str, str] | None:
    """Return constraints as a table; None if there are none.

    Raises:
        ValueError: one cannot be read; one line names it and says how it is written.
    """
    found = _by_metric("constraints", given, _NAMED_BOUND, "METRIC<=NUMBER or METRIC>=NUMBER")
    return {metric: _bound(metric, text) for metric, text in found.items()} or None


def _bound(metric: str, text: object) -> str:
    match = _BOUND.fullmatch(str(text).strip())
    with suppress(ValueError):
        if match and math.isfinite(limit := float(match[2])):
            return f"{match[1]} {limit!r}"
    raise ValueError(
        f"--constraints: {metric} {str(text).strip()!r} is no bound: write <= or >= and a number, such as '<= 10'"
    )


def parse_directions(given: Any) -> dict[str, Direction] | None:
    """Return directions as a table; None if there are none.

    Raises:
        ValueError: they cannot be read, or one metric is there twice.
    """
    found = _by_metric("directions", given, _NAMED_DIRECTION, "METRIC=maximize or METRIC=minimize")
    for metric, way in found.items():
        if way not in ("maximize", "minimize"):
            raise ValueError(f"--directions: {metric}={way}: a direction is maximize or minimize")
    return found or None


def _by_metric(setting: str, given: Any, pattern: re.Pattern[str], form: str) -> dict[str, Any]:
    """Return a setting with a value for each metric as a table; a text has parts of this form, separated by commas.

    Raises:
        ValueError: it cannot be read, or one metric is there twice.
    """
    pairs = list(given.items()) if isinstance(given, Mapping) else []
    if isinstance(given, str):
        for part in map(str.strip, given.strip(" ,").split(",")):
            if (match := pattern.fullmatch(part)) is None:
                raise ValueError(f"--{setting} {part!r}: write it as {form}, or leave it out")
            pairs.append((match[1], match[2]))
    elif not isinstance(given, Mapping | None):
        raise ValueError(f"{setting} is {given!r}: give a table by metric, or a text such as {form}")
    found: dict[str, Any] = {}
    for metric, value in pairs:
        if not isinstance(metric, str) or not (name := metric.strip()):
            raise ValueError(f"--{setting}: {metric!r} names no metric")
        if name in found:
            raise ValueError(f"--{setting}: {name} is there twice: leave one out")
        found[name] = value
    return found


def resolve_metrics(given: dict[str, Any]) -> dict[str, Any]:
    """Return settings in which `metric` and `direction` are those of the first of several.

    Of one metric there are not several.

    Raises:
        ValueError: they cannot be read, or `metric` is not the first of `directions`.
    """
    ways = parse_directions(given.get("directions"))
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
