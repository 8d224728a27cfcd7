"""The selection of the winner by the mean on new seeds; a difference that may be chance is a tie."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from hpsearch.search.finalists.winner import TIE_LEVEL, WinnerSelection, select_winner


@pytest.mark.parametrize(("maximize", "winner"), [(True, 4), (False, 2)])
def test_the_best_mean_wins(maximize: bool, winner: int) -> None:
    assert select_winner({2: [0.1, 0.2], 4: [0.9, 0.8], 3: [0.5, 0.51]}, maximize=maximize).winner == winner


def test_the_error_of_two_finalists_is_that_of_paired_differences() -> None:
    first, second = [0.91, 0.88, 0.93, 0.90], [0.90, 0.85, 0.93, 0.86]
    differences = [a - b for a, b in zip(first, second, strict=True)]
    choice = select_winner({0: first, 1: second}, maximize=True)
    assert choice.standard_error is not None
    assert math.isclose(choice.standard_error, statistics.stdev(differences) / math.sqrt(len(differences)))


def test_a_common_effect_of_a_seed_is_not_part_of_the_spread() -> None:
    """A good seed raises all values: the difference of 0.01 is significant although each finalist spreads by 0.1."""
    assert select_winner({0: [0.81, 0.91, 0.711], 1: [0.80, 0.90, 0.70]}, maximize=True).tie == ()


def test_a_difference_that_may_be_chance_is_a_tie() -> None:
    """The margin of two finalists is that of the paired t-test at the level 0.1; t(0.95, 3) = 2.3534."""
    first, second = [0.91, 0.88, 0.93, 0.90], [0.90, 0.85, 0.93, 0.86]
    choice = select_winner({7: first, 1: second}, maximize=True)
    assert choice.standard_error is not None
    assert choice.tie_margin == pytest.approx(2.3534 * choice.standard_error, rel=1e-4)
    assert (choice.winner, choice.tie) == (7, (1,)), "the difference of 0.02 is below the margin of 0.0215"
    assert select_winner({7: [x + 0.005 for x in first], 1: second}, maximize=True).tie == ()


def test_the_error_is_pooled_over_all_finalists() -> None:
    """Two finalists alone, with equal differences by chance, would make any difference significant."""
    pair = {0: [0.90, 0.80], 1: [0.89, 0.79]}
    assert select_winner(pair, maximize=True).tie == ()
    assert select_winner({**pair, 2: [0.70, 0.75], 3: [0.80, 0.60]}, maximize=True).tie == (1, 2, 3)


def test_ties_are_named_the_better_mean_first() -> None:
    table = {1: [0.80, 0.90], 2: [0.90, 0.83], 3: [0.83, 0.89], 4: [0.9, 0.82]}
    choice = select_winner(table, maximize=True)
    assert (choice.winner, choice.tie) == (2, (3, 4, 1))


def test_one_seed_separates_no_finalists() -> None:
    choice = select_winner({3: [0.90], 5: [0.91], 4: [0.91]}, maximize=True)
    assert choice == WinnerSelection(winner=4, tie=(5, 3), standard_error=None, tie_margin=None)


@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("finalists", [2, 3, 5])
def test_one_of_several_equal_finalists_is_rarely_a_winner_without_ties(finalists: int, seeds: int) -> None:
    rng = np.random.default_rng(finalists * 10 + seeds)
    studies = rng.normal(size=(1000, 1, seeds)) + rng.normal(size=(1000, finalists, seeds))
    clear = sum(not select_winner(dict(enumerate(table.tolist())), maximize=True).tie for table in studies)
    assert clear / len(studies) < TIE_LEVEL + 0.02


def test_one_finalist_wins_and_none_has_no_winner() -> None:
    assert select_winner({3: [0.9, 0.8]}, maximize=True).winner == 3
    assert select_winner({}, maximize=True).winner is None
