"""The selection of the winner by the mean on new seeds; a difference within the error is a tie."""

from __future__ import annotations

import math
import statistics

import pytest

from hpsearch.search.finalists.winner import select_winner


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


def test_a_difference_within_the_error_is_a_tie() -> None:
    choice = select_winner({7: [0.90, 0.86], 1: [0.85, 0.90], 5: [0.50, 0.51]}, maximize=True)
    assert (choice.winner, choice.tie) == (7, (1,))
    assert choice.standard_error is not None
    assert 0.005 < choice.standard_error < 0.38


def test_the_error_is_pooled_over_all_finalists() -> None:
    """Two finalists alone, with equal differences by chance, would make any difference significant."""
    pair = {0: [0.90, 0.80], 1: [0.89, 0.79]}
    assert select_winner(pair, maximize=True).tie == ()
    assert select_winner({**pair, 2: [0.70, 0.75], 3: [0.80, 0.60]}, maximize=True).tie == (1,)


def test_ties_are_named_the_better_mean_first() -> None:
    table = {1: [0.80, 0.90], 2: [0.90, 0.83], 3: [0.83, 0.89], 4: [0.9, 0.82]}
    choice = select_winner(table, maximize=True)
    assert (choice.winner, choice.tie) == (2, (3, 4, 1))


def test_one_seed_gives_no_spread() -> None:
    choice = select_winner({3: [0.90], 5: [0.91], 4: [0.91]}, maximize=True)
    assert (choice.winner, choice.tie, choice.standard_error) == (4, (5,), None)


def test_one_finalist_wins_and_none_has_no_winner() -> None:
    assert select_winner({3: [0.9, 0.8]}, maximize=True).winner == 3
    assert select_winner({}, maximize=True).winner is None
