"""The expected test score of a winner."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from scipy import stats

from hpsearch.search.finalists.winner import (
    COVERAGE,
    ExpectedScore,
    RunScore,
    WinnerSelection,
    estimate_test_score,
    select_winner,
)

SIZES = (600, 200, 200)


def expected(
    table: dict[int, list[float]], error: float = 0.01, *, metric: str = "gain", maximize: bool = True
) -> ExpectedScore:
    runs = {number: [RunScore(value, error, *SIZES) for value in row] for number, row in table.items()}
    found = estimate_test_score(runs, select_winner(table, maximize=maximize), metric=metric, maximize=maximize)
    assert found is not None
    return found


def test_the_mean_of_the_winner_is_shrunk_for_selection_bias() -> None:
    """Means 0.54 and 0.50, so B = 0.0008; their difference has the error 0.02, so E = 0.0002: a quarter is chance."""
    table = {0: [0.56, 0.52], 1: [0.50, 0.50]}
    assert select_winner(table, maximize=True).standard_error == pytest.approx(0.02)
    assert expected(table).mean == pytest.approx(0.52 + 0.75 * 0.02)
    assert expected({0: [0.56, 0.52]}).mean == pytest.approx(0.54), "alone it was not chosen"


def test_finalists_that_differ_only_by_chance_have_equal_expectations() -> None:
    table = {0: [0.60, 0.50], 1: [0.50, 0.58], 2: [0.55, 0.51], 3: [0.50, 0.55], 4: [0.53, 0.52]}
    assert expected(table).mean == pytest.approx(statistics.fmean(map(statistics.fmean, table.values())))


def test_a_clear_winner_keeps_its_mean() -> None:
    table = {0: [0.900, 0.901], 1: [0.50, 0.501], 2: [0.4, 0.401], 3: [0.3, 0.301], 4: [0.20, 0.201]}
    assert expected(table).mean == pytest.approx(0.9005, abs=1e-4)


def test_equal_runs_have_an_interval_from_sampling_error_only() -> None:
    """The variance is b^2 (f + v / t), with f = 1/3 and equal validation and test sizes; f = 1 for fixed splits."""
    found = expected({0: [0.5, 0.5], 1: [0.4, 0.4]})
    assert (found.high - found.low) / 2 == pytest.approx(1.6449 * 0.01 * math.sqrt(1 / 3 + 1), rel=1e-3)
    runs = {0: [RunScore(0.5, 0.01, *SIZES, has_new_split=False)] * 2}
    fixed = estimate_test_score(runs, select_winner({0: [0.5, 0.5]}, maximize=True), metric="gain", maximize=True)
    assert fixed is not None
    assert (fixed.high - fixed.low) / 2 == pytest.approx(1.6449 * 0.01 * math.sqrt(2), rel=1e-3)


def test_a_perfect_score_has_an_interval() -> None:
    """20 of 20: by the rule of succession 21 of 22, whose error is 0.0466."""
    runs = {0: [RunScore(1.0, 0.0, 60, 20, 20)] * 2}
    choice = select_winner({0: [1.0, 1.0]}, maximize=True)
    found = estimate_test_score(runs, choice, metric="accuracy", maximize=True)
    assert found is not None
    deviation = math.sqrt(21 / 22 / 22 / 20 * (1 / 3 + 1))
    total = 21 / 22 / 22 / deviation**2 - 1
    assert found.low == pytest.approx(stats.beta.ppf(0.05, 21 / 22 * total, total / 22))
    assert found.high == 1.0
    assert estimate_test_score(runs, choice, metric="gain", maximize=True) is None, (
        "no estimate for a metric that is no share"
    )


@pytest.mark.parametrize(
    ("metric", "worse"),
    [
        ("r2", [1 - 0.4 * factor for factor in (0.9, 1.1)]),  # four times as far from 1
        ("accuracy", [0.5 - 0.01 * math.sqrt(0.25 / 0.09), 0.5 + 0.01 * math.sqrt(0.25 / 0.09)]),
    ],
)
def test_a_worse_finalist_with_more_noise_does_not_widen_the_interval(metric: str, worse: list[float]) -> None:
    """All deviations equal those of the winner, relative to the noise that its score has."""
    own = [RunScore(value, 0.01, *SIZES) for value in (0.91, 0.89)]
    noise = statistics.stdev(worse) / statistics.stdev([0.91, 0.89])
    others = [RunScore(value, 0.01 * noise, *SIZES) for value in sorted(worse, reverse=True)]
    runs, same = {0: own, 1: others, 2: others}, dict.fromkeys(range(3), own)
    choice = WinnerSelection(0, (), None)
    found, like = (estimate_test_score(each, choice, metric=metric, maximize=True) for each in (runs, same))
    assert found is not None
    assert like is not None
    assert found.high - found.low == pytest.approx(like.high - like.low, rel=1e-6)


def test_no_accuracy_is_above_one() -> None:
    assert 0.9985 < expected({0: [0.999, 0.998]}, metric="accuracy").high <= 1.0
    assert expected({0: [0.999, 0.998]}).high > 1.0
    assert 0.0 <= expected({0: [0.01, 0.02]}, metric="accuracy").low < 0.015


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_declared_bounds_limit_the_interval(scale: float, *, maximize: bool) -> None:
    table = {0: [0.96 * scale, 0.98 * scale], 1: [0.95 * scale, 0.95 * scale]}
    runs = {number: [RunScore(value, 0.04 * scale, *SIZES) for value in row] for number, row in table.items()}
    choice = select_winner(table, maximize=maximize)
    free, bounded, cut = (
        estimate_test_score(runs, choice, metric="recall", maximize=maximize, bounds=bounds)
        for bounds in (None, (0.0, scale), (-math.inf, scale))
    )
    assert free is not None
    assert bounded is not None
    assert cut is not None
    assert 0 < bounded.low < bounded.mean < bounded.high <= scale < free.high
    assert cut.high == scale
    assert cut.low == pytest.approx(free.low, rel=0.01)  # the winner is closer to the bound, so its noise is smaller


def test_a_minimized_metric_mirrors_the_estimate() -> None:
    table = {0: [0.005, 0.006], 1: [0.7, 0.8]}
    found = expected(table, metric="size", maximize=False)
    assert found.mean == pytest.approx(0.0055, abs=0.002)
    assert found.low < 0 < found.mean < found.high
    assert expected(table, metric="mae", maximize=False).low == 0


def test_one_seed_has_no_interval() -> None:
    table = {0: [0.5], 1: [0.4]}
    runs = {number: [RunScore(value, 0.01, *SIZES) for value in row] for number, row in table.items()}
    assert estimate_test_score(runs, select_winner(table, maximize=True), metric="gain", maximize=True) is None


SPLIT_RATIOS = (0.0, 1.0, 2.0)  # of the effect of a split, common to all finalists, to that of a finalist


@pytest.mark.parametrize("ratio", SPLIT_RATIOS)
@pytest.mark.parametrize("seeds", [2, pytest.param(3, marks=pytest.mark.soak), pytest.param(5, marks=pytest.mark.soak)])
@pytest.mark.parametrize("finalists", [2, 5])
@pytest.mark.parametrize("cause", ["validation samples", "training samples"])
def test_the_prediction_interval_has_its_nominal_coverage(finalists: int, seeds: int, ratio: float, cause: str) -> None:
    """A simulation with a common effect of each split, overlapping validation splits, and a test set for one model."""
    rng = np.random.default_rng([finalists, seeds, int(2 * ratio)])
    f, inside, studies, effect = 1 / 3, 0, 800, 0.01 * ratio
    error = max(effect / math.sqrt(1 - f), 1e-6) if cause == "validation samples" else 0.005
    trained = effect if cause == "training samples" else 0.0
    for _ in range(studies):
        worth = 0.8 + 0.01 * rng.normal(size=finalists)
        pool = error * math.sqrt(f) * rng.normal()  # the effect of the samples outside of the test set
        splits = error * math.sqrt(1 - f) * rng.normal(size=seeds) + trained * rng.normal(size=seeds)
        values = worth[:, None] + pool + splits + 0.01 * rng.normal(size=(finalists, seeds))
        table = dict(enumerate(values.tolist()))
        found = expected(table, error)
        winner = select_winner(table, maximize=True).winner
        assert winner is not None
        test = worth[winner] + 0.01 * rng.normal() + trained * rng.normal() + error * rng.normal()
        inside += found.low <= test <= found.high
    assert COVERAGE - 0.04 <= inside / studies <= COVERAGE + 0.05


@pytest.mark.parametrize("worth", [0.5, 0.9, 0.98])
def test_the_interval_of_a_proportion_has_its_nominal_coverage(worth: float) -> None:
    rng = np.random.default_rng(int(100 * worth))
    inside, studies, size = 0, 800, 200
    error = math.sqrt(worth * (1 - worth) / size)
    for _ in range(studies):
        table = {n: (rng.binomial(size, worth, size=3) / size).tolist() for n in range(3)}
        found = expected(table, error, metric="accuracy")
        assert 0 <= found.low <= found.mean <= found.high <= 1
        inside += found.low <= rng.binomial(size, worth) / size <= found.high
    assert COVERAGE - 0.04 <= inside / studies <= 0.99
