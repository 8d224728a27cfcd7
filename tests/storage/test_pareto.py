"""Pareto fronts, crowding distance and hypervolume, compared with their definitions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpsearch.storage.rungs.fronts import (
    compute_crowding_distances,
    compute_front_ranks,
    compute_hypervolume,
    count_dominating,
    find_front,
    sort_by_crowding,
    to_losses,
)

vectors = st.integers(1, 3).flatmap(
    lambda metrics: st.lists(st.tuples(*[st.integers(0, 5)] * metrics), min_size=1, max_size=30)
)


def dominates(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True)) and one != other


@given(vectors)
def test_pareto_fronts_are_peeled_one_after_another(found: list[tuple[int, ...]]) -> None:
    rank = compute_front_ranks(np.array(found, dtype=float))
    left, expected = set(range(len(found))), 0
    while left:
        best = {one for one in left if not any(dominates(found[other], found[one]) for other in left)}
        assert {int(place) for place in np.flatnonzero(rank == expected)} == best
        left, expected = left - best, expected + 1


@given(vectors)
def test_the_number_of_dominating_points(found: list[tuple[int, ...]]) -> None:
    expected = [sum(dominates(other, one) for other in found) for one in found]
    assert count_dominating(np.array(found, dtype=float)).tolist() == expected


@given(vectors)
def test_points_are_ordered_by_pareto_front(found: list[tuple[int, ...]]) -> None:
    losses = np.array(found, dtype=float)
    order = sort_by_crowding(losses)
    assert sorted(order) == list(range(len(found)))
    assert (np.diff(compute_front_ranks(losses)[order]) >= 0).all()


def test_values_become_losses() -> None:
    losses = to_losses([(0.9, 5.0), (float("nan"), 1.0)], [True, False])
    assert losses.tolist() == [[-0.9, 5.0], [np.inf, 1.0]]
    assert to_losses([], [True, False]).shape == (0, 2)


def test_a_pareto_front_is_ordered_by_crowding_distance() -> None:
    losses = np.array([[0.0, 10.0], [1.0, 9.0], [2.0, 3.0], [10.0, 0.0], [1.0, 9.0]])
    assert compute_crowding_distances(losses).tolist() == pytest.approx([np.inf, 0.9, 1.8, np.inf, 0.0])
    assert sort_by_crowding(losses) == [0, 3, 2, 1, 4]
    assert find_front(losses) == [0, 1, 2, 3, 4]


def test_infinite_losses_do_not_affect_other_points() -> None:
    losses = np.array([[np.inf, 0.0], [1.0, 1.0], [0.5, 2.0]])
    assert find_front(losses) == [0, 1, 2]
    assert not np.isnan(compute_crowding_distances(losses)).any()


def test_the_dominated_hypervolume() -> None:
    assert compute_hypervolume(np.array([[1.0, 2.0], [2.0, 1.0], [2.0, 2.0], [5.0, 0.0]]), [4.0, 4.0]) == 8.0
    assert compute_hypervolume(np.empty((0, 2)), [1.0, 1.0]) == 0.0
