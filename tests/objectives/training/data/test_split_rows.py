"""Resplitting: the test split is kept, no group is in two splits, and training data precede validation data."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpsearch import ObjectiveError, Splits
from hpsearch.objectives.training.data.resplit import request_split
from hpsearch.objectives.training.data.split_rows import Blocks, split_halves

seeds = st.integers(0, 2**32 - 1)
shares = st.sampled_from([(0.2, 0.2), (0.1, 0.3), (0.4, 0.3)])


def _rows(part):
    return set(part.rows.tolist())


def _made(division, **how):
    with request_split(division):
        return Splits.make(**how)


@settings(max_examples=50, deadline=None)
@given(samples=st.integers(60, 200), classes=st.integers(2, 4), share=shares, seed=seeds, division=seeds)
def test_resplitting_keeps_the_test_split(samples, classes, share, seed, division):
    y = np.arange(samples) % classes
    how = {"x": np.arange(samples)[:, None], "y": y, "seed": seed, "val": share[0], "test": share[1]}
    own, fresh = _made(None, **how), _made(division, **how)
    assert fresh.hash_of("test") == own.hash_of("test")
    assert _rows(fresh.train) | _rows(fresh.val) <= _rows(own.train) | _rows(own.val)
    assert not _rows(fresh.train) & _rows(fresh.val)
    assert _rows(fresh.val) <= _rows(own.train), "what has chosen the configuration does not judge it again"
    assert abs(len(fresh.val) - min(len(own.val), len(own.train) / 2)) <= 1
    assert abs(len(fresh.train) - len(own.train)) <= max(2, 0.05 * len(own.val)), "as many to train on"
    counts = torch.bincount(fresh.val.y, minlength=classes)
    assert int(counts.max() - counts.min()) <= 2, "the shares of the classes stay"
    assert _made(division, **how).hash() == fresh.hash(), "a function of the two seeds"


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=12, max_size=40), share=shares, seed=seeds, division=seeds)
def test_no_group_is_in_two_parts(sizes, share, seed, division):
    groups = np.repeat(np.arange(len(sizes)) * 7, sizes)
    x = np.zeros((len(groups), 1))
    how = {"x": x, "y": x[:, 0], "seed": seed, "groups": groups, "val": share[0], "test": share[1]}
    own, fresh = _made(None, **how), _made(division, **how)
    assert fresh.hash_of("test") == own.hash_of("test")
    of = [set(groups[part.rows.numpy()]) for _, part in fresh.parts()]
    assert sum(map(len, of)) == len(set.union(*of))
    assert _rows(fresh.val) <= _rows(own.train)
    halves = split_halves(None, len(fresh.val), fresh.blocks, division)
    if halves is None:
        assert len(of[1]) < 2 or len(fresh.val) < 4
        return
    in_halves = [set(groups[fresh.val.rows.numpy()[half]]) for half in halves]
    assert not in_halves[0] & in_halves[1]
    assert set.union(*in_halves) == of[1]


@settings(max_examples=50, deadline=None)
@given(data=st.data(), samples=st.integers(40, 150), share=shares, division=seeds)
def test_training_data_precede_validation_data(data, samples, share, division):
    times = np.array(data.draw(st.lists(st.integers(0, 10_000), min_size=samples, max_size=samples, unique=True)))
    how = {"x": np.zeros((samples, 1)), "y": np.zeros(samples), "seed": 0, "times": times}
    how |= {"val": share[0], "test": share[1]}
    own, fresh = _made(None, **how), _made(division, **how)
    assert fresh.hash_of("test") == own.hash_of("test")
    train, val, test = (times[part.rows.numpy()] for _, part in fresh.parts())
    assert train.max() < val.min() <= val.max() < test.min()
    assert val.max() <= times[own.val.rows.numpy()].max(), "moved back, never on"
    assert len(train) >= len(own.train) // 2 - 1
    first, second = split_halves(None, len(fresh.val), fresh.blocks, division)
    assert val[first].max() < val[second].min()


@settings(max_examples=50, deadline=None)
@given(moments=st.lists(st.integers(0, 5), min_size=4, max_size=40), seed=seeds)
def test_no_time_is_in_both_halves(moments, seed):
    numbers = np.unique(np.sort(moments), return_inverse=True)[1]
    halves = split_halves(None, len(numbers), Blocks(numbers, ordered=True), seed)
    if len(set(moments)) < 2:
        assert halves is None
        return
    first, second = halves
    assert len(first) > 0
    assert len(second) > 0
    assert numbers[first].max() < numbers[second].min()


def test_too_few_samples_are_not_halved():
    assert split_halves(None, 3, None, 0) is None


def test_a_class_with_one_sample_is_in_one_half():
    first, second = split_halves(np.array([0, 0, 0, 1]), 4, None, 0)
    assert sorted([*first, *second]) == [0, 1, 2, 3]


@pytest.mark.parametrize("rare", [3, 4, 5])
def test_a_class_too_rare_for_resplitting_does_not_change_the_test_split(rare):
    y = np.r_[np.arange(300) % 3, np.full(rare, 3)]
    how = {"x": np.zeros((len(y), 1)), "y": y, "seed": 0}
    own, fresh = _made(None, **how), _made(5, **how)
    assert fresh.hash_of("test") == own.hash_of("test")
    assert _rows(fresh.val) <= _rows(own.train)


def test_too_few_groups_for_resplitting_stay_unchanged():
    groups = np.arange(60) // 20
    how = {"x": np.zeros((60, 1)), "y": np.zeros(60), "seed": 0, "groups": groups, "val": 1 / 3, "test": 1 / 3}
    assert _made(5, **how).hash() == _made(None, **how).hash()


def test_halves_have_the_same_shares_of_each_class():
    labels = np.repeat([0, 1, 2], [20, 10, 4])
    first, second = split_halves(labels, 34, None, 5)
    assert np.bincount(labels[first]).tolist() == np.bincount(labels[second]).tolist() == [10, 5, 2]
    assert sorted([*first, *second]) == list(range(34))


def test_an_impossible_resplit_is_an_error():
    with pytest.raises(ObjectiveError, match="cannot be split"), request_split(1):
        Splits.make(np.zeros((6, 1)), np.zeros(6), seed=0, groups=np.zeros(6))
