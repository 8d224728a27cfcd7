"""The Gaussian process uses few points per trial: the best values at grid epochs, converted to rank scores."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from hpsearch.search.freeze_thaw.observations import MAX_POINTS, select_observations

RANDOM = np.random.default_rng(0)


def test_observations_are_the_best_values_at_the_last_two_grid_epochs():
    found = select_observations([{epoch: abs(epoch - 8) / 10 for epoch in range(1, 11)}, {1: 5.0}], 27, RANDOM)
    assert list(found.trial) == [0, 0, 1]
    assert np.exp(found.log_epoch * math.log(27)) == pytest.approx([9, 10, 1])  # 1, 2, 3, 4, 6, 9 and 10 itself
    assert found.loss.tolist() == [0.0, 0.0, 5.0]  # the value of epoch 8, which is not on the grid, counts from then on


def test_the_epoch_scale_is_logarithmic():
    assert select_observations([{27: 0.0, 1: 0.0}], 27, RANDOM).log_epoch == pytest.approx([0.0, 1.0])
    assert select_observations([{1: 0.0}], 1, RANDOM).log_epoch == pytest.approx([1.0])  # the first epoch is the last


def test_nan_is_worse_than_all_numbers():
    found = select_observations([{1: math.nan}, {1: 1e30}, {1: math.inf}, {1: 2.0, 2: math.nan}], 9, RANDOM)
    assert list(found.loss) == [math.inf, 1e30, math.inf, 2.0, 2.0]
    assert np.isfinite(found.scores).all()
    assert found.scores[0] == found.scores[2] == found.scores.max()


def test_scores_depend_on_ranks_only():
    found = select_observations([{1: loss} for loss in (3.0, 1.0, 1000.0, 2.0)], 9, RANDOM)
    np.testing.assert_allclose(found.scores, norm.ppf((np.array([3, 1, 4, 2]) - 0.5) / 4))


def test_too_many_observations_are_reduced_to_the_longest_and_the_best():
    short = [{1: 1.0 + i} for i in range(2 * MAX_POINTS)]
    long = [{1: 9.0, 27: 0.5}] * 10
    found = select_observations([*short, *long], 27, np.random.default_rng(0))
    assert len(found.loss) == MAX_POINTS
    assert set(range(2 * MAX_POINTS, 2 * MAX_POINTS + 10)) <= set(found.trial)  # all of the long ones
    assert set(range(MAX_POINTS // 4)) <= set(found.trial)  # the best of the short ones
    assert max(found.trial[found.trial < 2 * MAX_POINTS]) > MAX_POINTS  # and some of the others
    again = select_observations([*short, *long], 27, np.random.default_rng(0))
    assert list(again.trial) == list(found.trial)
