"""The order of multi-objective trials at a rung: by Pareto front, then by distance within a front."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpsearch.storage.rungs.fronts import compute_front_ranks, sort_by_epsilon_net, sort_by_front

losses = st.integers(1, 3).flatmap(
    lambda metrics: st.lists(
        st.lists(st.sampled_from([0.0, 1.0, 2.0, 5.0, np.inf]), min_size=metrics, max_size=metrics), max_size=25
    ).map(lambda rows: np.array(rows, dtype=float).reshape(-1, metrics))
)


@given(losses)
def test_trials_are_ordered_by_pareto_fronts_with_failed_ones_last(found: np.ndarray) -> None:
    places = sort_by_front(found)
    assert sorted(places) == list(range(len(found)))
    ended = [place for place in places if np.isfinite(found[place, 0])]
    assert places[: len(ended)] == ended
    assert places[len(ended) :] == sorted(places[len(ended) :])
    assert (np.diff(compute_front_ranks(found[ended])) >= 0).all()


@given(losses, st.integers(0, 30))
def test_a_partial_order_equals_the_start_of_the_full_order(found: np.ndarray, most: int) -> None:
    assert sort_by_front(found, most) == sort_by_front(found)[:most]


@given(losses)
def test_the_order_does_not_depend_on_units(found: np.ndarray) -> None:
    assert sort_by_front(found) == sort_by_front(4.0 * found + 8.0)


def test_one_metric_is_ordered_by_loss_and_ties_by_number() -> None:
    found = np.array([[3.0], [1.0], [2.0], [1.0]])
    assert sort_by_front(found) == [1, 3, 2, 0]


def test_farthest_point_order_starts_with_the_best_of_the_first_metric() -> None:
    front = np.array([[0.5, 0.5], [0.0, 1000.0], [0.1, 900.0], [1.0, 0.0], [0.5, 0.5]])
    assert sort_by_epsilon_net(front) == [1, 3, 0, 2, 4]


def test_a_pareto_front_of_equal_points() -> None:
    assert sort_by_front(np.ones((4, 2))) == [0, 1, 2, 3]


def test_an_unknown_metric_does_not_hide_others() -> None:
    found = np.array([[0.3, np.inf], [0.1, np.inf], [0.2, np.inf]])
    assert sort_by_front(found) == [1, 2, 0]
