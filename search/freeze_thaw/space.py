"""The search space as a unit cube, and the maximization of the acquisition function in it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

_MISSING = 0.5  # features of a missing number: the middle of the range, and a distance of half the range
_STEP_EXPONENTS = (-2.5, -0.7)  # range of the decimal logarithm of a step's length, relative to the parameter's range
_SWITCH_PROBABILITY = 0.1  # probability that a step changes the choice of a categorical parameter
_NEAR_DEVIATION = 0.25  # standard deviation of values near a given value, relative to the parameter's range

Numeric = FloatDistribution | IntDistribution
SearchSpace = dict[str, BaseDistribution]


class Space:
    """Search space that infers the conditions of conditional parameters from configurations.

    A "row" is a configuration in the unit cube: per parameter, a number from 0 to 1, the index of a choice, or NaN if
    the configuration does not have the parameter.

    Args:
        distributions: float, integer or categorical distributions by parameter name.
        seen: configurations of trials.
        drawn: sampled configurations of no trial, from which conditions are inferred too.
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
        rows = [self.to_row(params) for params in [*seen, *drawn]]
        shown = np.array(rows).reshape(len(rows), len(self.names))
        self.rows = shown[: len(seen)]
        self._rules = _infer_rules(shown, self._choices)

    @property
    def param_by_feature(self) -> np.ndarray:
        """For each feature column, the index of the parameter that it encodes [columns]."""
        return np.array([j for j, choices in enumerate(self._choices) for _ in range(choices or 2)])

    def to_features(self, rows: np.ndarray) -> np.ndarray:
        """Convert rows [n, parameters] to features [n, columns] for the Gaussian process.

        A categorical parameter has one column per choice, and a number has two columns. The distance between different
        choices is the distance between the two ends of a range.
        """
        columns: list[np.ndarray] = []
        for column, choices in zip(rows.T, self._choices, strict=True):
            if choices:
                columns += [(column == choice) / math.sqrt(2) for choice in range(choices)]
            else:
                off = np.isnan(column)
                columns += [np.where(off, _MISSING, column), _MISSING * off]
        return np.column_stack(columns).astype(np.float64)

    def contains_same_trial(self, rows: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Return for each of `rows` [n, parameters] whether it is the configuration of one of `others` [m, parameters].

        A configuration of `others` without a parameter equals a row that differs only by having it: other parameters
        determine whether a configuration has the parameter, even if its condition is unknown. Rounding errors of the
        encoding are ignored.
        """
        rows, others = np.round(rows, 9) + 0.0, np.round(others, 9) + 0.0
        found = np.zeros(len(rows), dtype=bool)
        absent = np.isnan(others)
        for pattern in np.unique(absent, axis=0):
            known = {row.tobytes() for row in others[(absent == pattern).all(1)][:, ~pattern]}
            found |= np.array([row.tobytes() in known for row in np.ascontiguousarray(rows[:, ~pattern])], dtype=bool)
        return found

    def to_row(self, params: Mapping[str, Any]) -> list[float]:
        """Encode a configuration as a row; a value outside the range of its distribution is clipped."""
        pairs = zip(self.names, self._distributions, strict=True)
        return [_to_unit(d, params[name]) if name in params else math.nan for name, d in pairs]

    def to_params(self, row: np.ndarray) -> dict[str, Any]:
        """Decode a row to a configuration."""
        pairs = zip(self.names, self._distributions, row, strict=True)
        return {name: _from_unit(d, float(number)) for name, d, number in pairs if not math.isnan(number)}

    def sample(self, random: np.random.Generator, count: int) -> np.ndarray:
        """Return rows of random configurations [count, parameters]."""
        return self._apply_constraints(self._sample_cube(random, count))

    def perturb(self, random: np.random.Generator, rows: np.ndarray, count: int) -> np.ndarray:
        """Return `count` random neighbors of each row of `rows` [n, parameters], at short and long distances."""
        filled = np.where(np.isnan(rows), self._sample_cube(random, len(rows)), rows)
        moved = np.repeat(filled, count, axis=0)
        lengths = 10 ** random.uniform(*_STEP_EXPONENTS, size=len(moved))
        for j, choices in enumerate(self._choices):
            if choices:
                switched = random.random(len(moved)) < _SWITCH_PROBABILITY
                moved[switched, j] = random.integers(choices, size=int(switched.sum()))
            else:
                moved[:, j] = np.clip(moved[:, j] + lengths * random.standard_normal(len(moved)), 0.0, 1.0)
        return self._apply_constraints(moved)

    def _sample_cube(self, random: np.random.Generator, count: int) -> np.ndarray:
        rows = random.random((count, len(self.names)))
        for j, choices in enumerate(self._choices):
            if choices:
                rows[:, j] = random.integers(choices, size=count)
        return rows

    def _apply_constraints(self, rows: np.ndarray) -> np.ndarray:
        """Return rows with numbers rounded to the steps of their distributions, and without inapplicable parameters."""
        rounded = rows.copy()
        for j, d in enumerate(self._distributions):
            if isinstance(d, Numeric) and d.step is not None and not d.single():
                rounded[:, j] = _round_to_step(d, rows[:, j])
        for j, rule in self._rules.items():
            rounded[~_are_satisfied(rule, rounded), j] = math.nan
        return rounded


@dataclass(frozen=True)
class _ParameterCondition:
    """Condition under which a configuration has a parameter: the choice or the range of another parameter.

    Attributes:
        parameter: index of the other parameter.
        low, high: inclusive range of the other parameter's number.
        excluded_choices: choices of the other parameter with which the configuration does not have the parameter.
    """

    parameter: int
    low: float
    high: float
    excluded_choices: tuple[float, ...] = ()

    def is_satisfied(self, rows: np.ndarray) -> np.ndarray:
        """Return for each of `rows` [n, parameters] whether the condition holds; False without the other parameter."""
        column = rows[:, self.parameter]
        return (self.low <= column) & (column <= self.high) & ~np.isin(column, self.excluded_choices)


_Rule = tuple[_ParameterCondition, ...]  # conditions that must all hold


def _are_satisfied(rule: _Rule, rows: np.ndarray) -> np.ndarray:
    return np.all([condition.is_satisfied(rows) for condition in rule], axis=0)  # type: ignore[no-any-return]


def _infer_rules(rows: np.ndarray, choices: Sequence[int]) -> dict[int, _Rule]:
    """Infer the conditions of the parameters that some rows lack: one condition each, or both of two conditions.

    A condition comes after the conditions of the parameter that it depends on. A parameter for which no conditions
    match the rows is treated as unconditional.
    """
    present = ~np.isnan(rows)
    counts = present.sum(0)
    found: dict[int, _Rule] = {}
    for j in sorted(range(rows.shape[1]), key=lambda j: -counts[j]):
        if counts[j] in (0, len(rows)):
            continue
        others = sorted(set(range(rows.shape[1])) - {j}, key=lambda by: -counts[by])
        conditions = [
            condition
            for by in others
            for condition in _find_conditions(rows[:, by], present[:, j], by, categorical=choices[by] > 0)
        ]
        # With few rows, two numeric conditions often match by chance. So those on choices are tried first.
        by_kind = sorted(conditions, key=lambda condition: not condition.excluded_choices)
        pairs = (pair for pair in itertools.combinations(by_kind, 2) if pair[0].parameter != pair[1].parameter)
        rules: Iterator[_Rule] = itertools.chain(((one,) for one in conditions), pairs)
        rule = next((rule for rule in rules if np.array_equal(_are_satisfied(rule, rows), present[:, j])), None)
        if rule is not None:
            found[j] = rule
    return found


def _find_conditions(
    column: np.ndarray, present: np.ndarray, by: int, *, categorical: bool
) -> Iterator[_ParameterCondition]:
    """Yield the conditions on parameter `by` that all configurations with a parameter satisfy, and some others do not.

    Args:
        column: values of parameter `by` [rows].
        present: whether the configuration has the conditional parameter [rows].
        by: index of the parameter in the conditions.
        categorical: whether `by` is categorical.
    """
    with_it, without = column[present], column[~present]
    if np.isnan(with_it).any():
        return
    some_lack, without = np.isnan(without).any(), without[~np.isnan(without)]
    if categorical:
        excluded = np.setdiff1d(without, with_it)
        if some_lack or len(excluded):
            yield _ParameterCondition(by, -math.inf, math.inf, tuple(excluded))
        return
    if some_lack:
        yield _ParameterCondition(by, -math.inf, math.inf)
    if len(without) and without.min() < with_it.min():
        yield _ParameterCondition(by, with_it.min(), math.inf)
    if len(without) and without.max() > with_it.max():
        yield _ParameterCondition(by, -math.inf, with_it.max())


def contains_value(distribution: BaseDistribution, value: Any) -> bool:
    """Return whether a value is in the range, or equals a choice of the same type; steps are ignored."""
    if isinstance(distribution, CategoricalDistribution):
        return any(value == choice and type(value) is type(choice) for choice in distribution.choices)
    assert isinstance(distribution, Numeric)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and distribution.low <= value <= distribution.high


def sample_near(distribution: BaseDistribution, value: Any, random: np.random.Generator) -> Any:
    """Return a random value near a given one, as in PriorBand (Mallik et al. 2023).

    A number has a normal distribution around `value`, truncated to the range. A categorical parameter with c choices
    keeps `value` with probability c / (2 c - 1). Otherwise, one of all choices is drawn uniformly.

    Args:
        distribution: distribution of the parameter, which contains `value`.
        value: center of the samples.
        random: random generator.
    """
    if isinstance(distribution, CategoricalDistribution):
        choices = len(distribution.choices)
        return (
            value if random.random() < choices / (2 * choices - 1) else distribution.choices[random.integers(choices)]
        )
    center = _to_unit(distribution, value)
    while not 0 <= (number := center + _NEAR_DEVIATION * random.standard_normal()) <= 1:
        pass
    return _from_unit(distribution, number)


def _to_unit(d: BaseDistribution, value: Any) -> float:
    if isinstance(d, CategoricalDistribution):
        return float(d.to_internal_repr(value))
    assert isinstance(d, Numeric)
    low, high, at = float(d.low), float(d.high), float(value)
    if low == high:
        return _MISSING
    if d.log:
        low, high, at = math.log(low), math.log(high), math.log(max(at, low))
    return min(max((at - low) / (high - low), 0.0), 1.0)


def _from_unit(d: BaseDistribution, number: float) -> Any:
    if isinstance(d, CategoricalDistribution):
        return d.to_external_repr(int(number))
    assert isinstance(d, Numeric)
    low, high = float(d.low), float(d.high)
    value = _rescale(d, np.array(number)).item()
    if d.step is not None:
        value = low + round((value - low) / d.step) * d.step
    value = min(max(value, low), high)
    return int(value) if isinstance(d, IntDistribution) else value


def _rescale(d: Numeric, numbers: np.ndarray) -> np.ndarray:
    if d.log:
        return np.exp(math.log(d.low) + numbers * (math.log(d.high) - math.log(d.low)))
    return d.low + numbers * (d.high - d.low)


def _round_to_step(d: Numeric, numbers: np.ndarray) -> np.ndarray:
    """Round numbers in the unit cube to the steps of a distribution."""
    assert d.step is not None
    values = d.low + np.round((_rescale(d, numbers) - d.low) / d.step) * d.step
    values = np.clip(values, d.low, d.high)
    if d.log:
        return np.log(values / d.low) / math.log(d.high / d.low)
    return (values - d.low) / (d.high - d.low)


RANDOM_CANDIDATES = 800  # candidates sampled from the whole space
NEIGHBORS_PER_TRIAL = 60  # candidates around each of the top trials and top random candidates
TOP_TRIALS = 5  # number of top trials, and of top random candidates


def maximize_acquisition(
    acquisition: Callable[[np.ndarray], np.ndarray],
    space: Space,
    random: np.random.Generator,
    *,
    around: np.ndarray,
    had: np.ndarray,
) -> tuple[np.ndarray, int | None]:
    """Return the row with the highest acquisition value among random candidates and neighbors of the best trials.

    Rows in `had` are chosen only if there are no other candidates. Otherwise the same corner of the space would be
    suggested repeatedly when little can be gained.

    Args:
        acquisition: function that returns the acquisition values [n] of rows [n, parameters].
        space: search space of the rows.
        random: random generator.
        around: rows of the best trials [n, parameters].
        had: rows of existing trials [n, parameters].

    Returns:
        The row, and the index in `around` of the trial whose neighbor it is; None instead of the index if the row is a
        random candidate or a neighbor of one.
    """
    drawn = space.sample(random, RANDOM_CANDIDATES)
    gains = acquisition(drawn)
    tops = np.concatenate([around, drawn[np.argsort(-gains, kind="stable")[:TOP_TRIALS]]])
    near = space.perturb(random, tops, NEIGHBORS_PER_TRIAL)
    tried, gains = np.concatenate([drawn, near]), np.concatenate([gains, acquisition(near)])
    chosen = int(np.argmax(np.where(space.contains_same_trial(tried, had), -np.inf, gains)))
    top = (chosen - RANDOM_CANDIDATES) // NEIGHBORS_PER_TRIAL  # negative for random candidates
    return tried[chosen], top if 0 <= top < len(around) else None
