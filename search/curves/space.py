"""The search space as a unit cube, and candidates in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

_OFF = 0.5  # where a number counts as being that is not there: in the middle, and half a range away from all that are
_MOVES = (-2.5, -0.7)  # powers of ten between which the length of a step is drawn, in ranges
_SWITCH = 0.1  # how probable another choice is in a step

Numeric = FloatDistribution | IntDistribution


class Space:
    """Parameters with their distributions; which of them a configuration has is learnt from trials.

    Args:
        distributions: by name; all floats, integers or categorical.
        seen: configurations of trials.
        drawn: configurations that nobody ran, which show as well what depends on what.
    """

    def __init__(
        self,
        distributions: Mapping[str, BaseDistribution],
        seen: Sequence[Mapping[str, Any]],
        drawn: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.names = sorted(distributions)
        self._distributions = [distributions[name] for name in self.names]
        self._choices = [len(d.choices) if isinstance(d, CategoricalDistribution) else 0 for d in self._distributions]
        rows = [self.row(params) for params in [*seen, *drawn]]
        shown = np.array(rows).reshape(len(rows), len(self.names))
        self.rows = shown[: len(seen)]
        self._rules = _rules(shown, self._choices)

    @property
    def owner(self) -> np.ndarray:
        """Which parameter each column of features belongs to [columns]."""
        return np.array([j for j, choices in enumerate(self._choices) for _ in range(choices or 2)])

    def features(self, rows: np.ndarray) -> np.ndarray:
        """Rows [n, parameters] as features [n, columns]: a column for each choice, two for a number.

        Two configurations with different choices are as far apart as the ends of a range are.
        """
        columns: list[np.ndarray] = []
        for column, choices in zip(rows.T, self._choices, strict=True):
            if choices:
                columns += [(column == choice) / math.sqrt(2) for choice in range(choices)]
            else:
                off = np.isnan(column)
                columns += [np.where(off, _OFF, column), _OFF * off]
        return np.column_stack(columns).astype(np.float64)

    def row(self, params: Mapping[str, Any]) -> list[float]:
        """A configuration as a row; what is out of its range counts as the end of it."""
        pairs = zip(self.names, self._distributions, strict=True)
        return [_number(d, params[name]) if name in params else math.nan for name, d in pairs]

    def params(self, row: np.ndarray) -> dict[str, Any]:
        """A row as a configuration."""
        pairs = zip(self.names, self._distributions, row, strict=True)
        return {name: _value(d, float(number)) for name, d, number in pairs if not math.isnan(number)}

    def drawn(self, random: np.random.Generator, count: int) -> np.ndarray:
        """Rows [count, parameters] of configurations at random."""
        return self._as_run(self._any(random, count))

    def near(self, random: np.random.Generator, rows: np.ndarray, count: int) -> np.ndarray:
        """`count` rows around each of `rows` [n, parameters], some steps short, some long."""
        filled = np.where(np.isnan(rows), self._any(random, len(rows)), rows)
        moved = np.repeat(filled, count, axis=0)
        lengths = 10 ** random.uniform(*_MOVES, size=len(moved))
        for j, choices in enumerate(self._choices):
            if choices:
                switched = random.random(len(moved)) < _SWITCH
                moved[switched, j] = random.integers(choices, size=int(switched.sum()))
            else:
                moved[:, j] = np.clip(moved[:, j] + lengths * random.standard_normal(len(moved)), 0.0, 1.0)
        return self._as_run(moved)

    def _any(self, random: np.random.Generator, count: int) -> np.ndarray:
        rows = random.random((count, len(self.names)))
        for j, choices in enumerate(self._choices):
            if choices:
                rows[:, j] = random.integers(choices, size=count)
        return rows

    def _as_run(self, rows: np.ndarray) -> np.ndarray:
        """Rows with what they would be run with: steps rounded, and nothing that is not asked for."""
        rounded = rows.copy()
        for j, d in enumerate(self._distributions):
            if isinstance(d, Numeric) and d.step is not None and not d.single():
                rounded[:, j] = _rounded(d, rows[:, j])
        for j, rule in self._rules.items():
            rounded[~rule.holds(rounded), j] = math.nan
        return rounded


@dataclass(frozen=True)
class _Rule:
    """When a configuration has a parameter: by another one's choice, or by where that is in its range.

    Attributes:
        by: index of the other parameter.
        low, high: between which its number is, both included.
        but: choices among these with which it is not there all the same.
    """

    by: int
    low: float
    high: float
    but: tuple[float, ...] = ()

    def holds(self, rows: np.ndarray) -> np.ndarray:
        """For which of the rows [n, parameters]; for none that lacks the other one."""
        column = rows[:, self.by]
        return (self.low <= column) & (column <= self.high) & ~np.isin(column, self.but)


def _rules(rows: np.ndarray, choices: Sequence[int]) -> dict[int, _Rule]:
    """What the parameters that are not always there depend on, as far as trials show; none before what it depends on.

    One that follows no other parameter counts as always there.
    """
    there = ~np.isnan(rows)
    often = there.sum(0)
    found: dict[int, _Rule] = {}
    for j in sorted(range(rows.shape[1]), key=lambda j: -often[j]):
        if often[j] in (0, len(rows)):
            continue
        for by in sorted(set(range(rows.shape[1])) - {j}, key=lambda by: -often[by]):
            rule = _rule(rows[:, by], there[:, j], by, categorical=choices[by] > 0)
            if rule is not None and np.array_equal(rule.holds(rows), there[:, j]):
                found[j] = rule
                break
    return found


def _rule(column: np.ndarray, there: np.ndarray, by: int, *, categorical: bool) -> _Rule | None:
    with_it, without = column[there], column[~there]
    without = without[~np.isnan(without)]
    if np.isnan(with_it).any():
        return None
    if categorical:
        return _Rule(by, -math.inf, math.inf, tuple(np.unique(without)))
    if len(without) == 0 or without.max() < with_it.min():
        return _Rule(by, with_it.min() if len(without) else -math.inf, math.inf)
    return _Rule(by, -math.inf, with_it.max()) if with_it.max() < without.min() else None


def _number(d: BaseDistribution, value: Any) -> float:
    if isinstance(d, CategoricalDistribution):
        return float(d.to_internal_repr(value))
    assert isinstance(d, Numeric)
    low, high, at = float(d.low), float(d.high), float(value)
    if low == high:
        return _OFF
    if d.log:
        low, high, at = math.log(low), math.log(high), math.log(max(at, low))
    return min(max((at - low) / (high - low), 0.0), 1.0)


def _value(d: BaseDistribution, number: float) -> Any:
    if isinstance(d, CategoricalDistribution):
        return d.to_external_repr(int(number))
    assert isinstance(d, Numeric)
    low, high = float(d.low), float(d.high)
    value = _unscaled(d, np.array(number)).item()
    if d.step is not None:
        value = low + round((value - low) / d.step) * d.step
    value = min(max(value, low), high)
    return int(value) if isinstance(d, IntDistribution) else value


def _unscaled(d: Numeric, numbers: np.ndarray) -> np.ndarray:
    if d.log:
        return np.exp(math.log(d.low) + numbers * (math.log(d.high) - math.log(d.low)))
    return d.low + numbers * (d.high - d.low)


def _rounded(d: Numeric, numbers: np.ndarray) -> np.ndarray:
    """Numbers of values that the steps of a distribution can be."""
    assert d.step is not None
    values = d.low + np.round((_unscaled(d, numbers) - d.low) / d.step) * d.step
    values = np.clip(values, d.low, d.high)
    if d.log:
        return np.log(values / d.low) / math.log(d.high / d.low)
    return (values - d.low) / (d.high - d.low)


DRAWN = 800  # configurations at random among which the best is sought
AROUND = 60  # configurations around each of the
TOPS = 5  # best trials, and of those at random


def best_candidate(
    judged: Callable[[np.ndarray], np.ndarray],
    space: Space,
    random: np.random.Generator,
    *,
    around: np.ndarray,
    had: np.ndarray,
) -> tuple[np.ndarray, int | None]:
    """The row that is judged best among some at random and around the best trials.

    None that a trial `had`, while there are others: where hardly anything is to be gained, the same corner of the
    space would be tried over and over.

    Args:
        judged: gives the gain [n] that is expected of rows [n, parameters].
        space: whose rows they are.
        random: draws them.
        around: rows of the best trials [n, parameters].
        had: rows of trials [n, parameters].

    Returns:
        The row, and the index of that which it was sought around; None where it came of one at random.
    """
    drawn = space.drawn(random, DRAWN)
    gains = judged(drawn)
    tops = np.concatenate([around, drawn[np.argsort(-gains, kind="stable")[:TOPS]]])
    near = space.near(random, tops, AROUND)
    tried, gains = np.concatenate([drawn, near]), np.concatenate([gains, judged(near)])
    chosen = int(np.argmax(np.where(_among(tried, had), -np.inf, gains)))
    top = (chosen - DRAWN) // AROUND  # below 0 for those at random
    return tried[chosen], top if 0 <= top < len(around) else None


def _among(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Which rows [n, parameters] are among others, but for the rounding of a value to a number and back."""
    known = {row.tobytes() for row in np.round(others, 9) + 0.0}
    return np.array([row.tobytes() in known for row in np.round(rows, 9) + 0.0], dtype=bool)
