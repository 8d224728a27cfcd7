"""Directions of multi-objective studies, and constraints: parsing, validation and evaluation."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

Direction = Literal["maximize", "minimize"]

_BOUND = re.compile(r"(<=|>=)\s*(\S+)")
_NAMED_BOUND = re.compile(r"([^<>=]+?)\s*((?:<=|>=|<|>|=).*)")
_NAMED_DIRECTION = re.compile(r"([^=]+?)\s*=\s*(.*)")


@dataclass(frozen=True)
class Bound:
    """A bound on a metric, from the setting `constraints`.

    Attributes:
        metric: name of the metric.
        operator: ``<=`` or ``>=``.
        limit: the bound, a finite number.
    """

    metric: str
    operator: str
    limit: float

    def __str__(self) -> str:
        """Return the bound as text: ``model_mb <= 10``."""
        return f"{self.metric} {self.operator} {self.limit:g}"

    def format_violation(self, value: float) -> str:
        """Return a text for a value that violates the bound: ``model_mb 12.5 is not <= 10``."""
        return f"{self.metric} {value:.6g} is not {self.operator} {self.limit:g}"

    def violation(self, value: float) -> float:
        """Return the amount by which a value violates the bound, as in Optuna; it is infinite for NaN.

        The amount is positive for a violation, else negative or zero.
        """
        if math.isnan(value):
            return math.inf
        return value - self.limit if self.operator == "<=" else self.limit - value


def make_bounds(constraints: Mapping[str, str]) -> tuple[Bound, ...]:
    """Convert valid constraints, such as ``{"model_mb": "<= 10"}``, to bounds."""
    parts = ((metric, *text.split()) for metric, text in constraints.items())
    return tuple(Bound(metric, sign, float(limit)) for metric, sign, limit in parts)


def parse_constraints(given: Any) -> dict[str, str] | None:
    """Return the setting `constraints` as a dictionary by metric; None if it is empty.

    Raises:
        ValueError: a constraint is invalid; the message shows the expected form.
    """
    found = _parse_by_metric("constraints", given, _NAMED_BOUND, "METRIC<=NUMBER or METRIC>=NUMBER")
    return {metric: _normalize_bound(metric, text) for metric, text in found.items()} or None


def _normalize_bound(metric: str, text: object) -> str:
    given = str(text).strip()
    match = _BOUND.fullmatch(given)
    with suppress(ValueError):
        if match and math.isfinite(limit := float(match[2])):
            return f"{match[1]} {limit!r}"
    raise ValueError(f"--constraints: {metric} {given!r} is not a bound; write <= or >= and a number, such as '<= 10'")


def parse_directions(given: Any) -> dict[str, Direction] | None:
    """Return the setting `directions` as a dictionary by metric; None if it is empty.

    Raises:
        ValueError: the setting is invalid, or names a metric twice.
    """
    found = _parse_by_metric("directions", given, _NAMED_DIRECTION, "METRIC=maximize or METRIC=minimize")
    for metric, direction in found.items():
        if direction not in ("maximize", "minimize"):
            raise ValueError(f"--directions {metric}={direction} is invalid; use maximize or minimize")
    return found or None


def _parse_by_metric(setting: str, given: Any, pattern: re.Pattern[str], form: str) -> dict[str, Any]:
    """Return a setting with one value per metric as a dictionary by metric.

    Args:
        setting: name of the setting.
        given: a dictionary, or a text with comma-separated parts.
        pattern: regular expression of one part, with the metric and the value as groups.
        form: description of the expected form of a part, for error messages.

    Raises:
        ValueError: the setting is invalid, or names a metric twice.
    """
    pairs = list(given.items()) if isinstance(given, Mapping) else []
    if isinstance(given, str):
        for part in map(str.strip, given.strip(" ,").split(",")):
            if (match := pattern.fullmatch(part)) is None:
                raise ValueError(f"--{setting} {part!r} is invalid; write {form}, or remove this part")
            pairs.append((match[1], match[2]))
    elif not isinstance(given, Mapping | None):
        raise ValueError(f"{setting} is {given!r}; give a table with one value per metric, or a text such as {form}")
    found: dict[str, Any] = {}
    for metric, value in pairs:
        if not isinstance(metric, str) or not (name := metric.strip()):
            raise ValueError(f"--{setting}: {metric!r} is not the name of a metric; give a name")
        if name in found:
            raise ValueError(f"--{setting} names {name} twice; remove one of them")
        found[name] = value
    return found


def resolve_metrics(given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings, in which the first entry of `directions` sets `metric` and `direction`.

    If `directions` has a single entry, the study is single-objective, and `directions` becomes None.

    Raises:
        ValueError: `directions` is invalid, or `metric` or `direction` contradicts its first entry.
    """
    directions = parse_directions(given.get("directions"))
    if directions is None:
        return given
    metric, direction = next(iter(directions.items()))
    named = given.get("metric", metric)
    if named not in directions:
        raise ValueError(f"--metric {named!r} is not in --directions {', '.join(directions)}; remove --metric")
    if named != metric:
        raise ValueError(f"--metric {named!r} must be first in --directions, because it selects the best epoch")
    if (other := given.get("direction", direction)) != direction:
        raise ValueError(f"--direction {other} contradicts --directions {metric}={direction}; remove --direction")
    several = None if len(directions) == 1 else directions
    return {**given, "metric": metric, "direction": direction, "directions": several}
