"""The division of training and validation samples into folds."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from hpsearch import Objective, Splits, TrainConfig
from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.data.folds import Fold
from hpsearch.objectives.training.loop.prepare import prepare_folds, prepare_splits

SAMPLES = 60


class Divided(Objective):
    """An objective whose data is `make(seed)`."""

    def __init__(self, make):
        self._make = make

    def suggest(self, trial):
        return TrainConfig()

    def data(self, seed):
        return self._make(seed)

    def model(self, config, train):
        raise NotImplementedError


X = np.arange(SAMPLES, dtype=np.float32)[:, None]
CLASSES = np.arange(SAMPLES) % 4
GROUPS = np.arange(SAMPLES) // 3
TIMES = np.arange(SAMPLES) // 2


def by_class(seed):
    return Splits.make(X, CLASSES, seed=seed)


def by_group(seed):
    return Splits.make(X, X[:, 0], seed=seed, groups=GROUPS)


def by_value(seed):
    return Splits.make(X, X[:, 0] / 7, seed=seed)


def by_time(seed):
    return Splits.make(X, X[:, 0] / 7, seed=seed, times=TIMES)


FIXED = by_value(0)  # made outside of data()


def rows_of(part):
    return set(part.rows.tolist())


@pytest.mark.parametrize("make", [by_class, by_group, by_value])
def test_each_sample_outside_the_test_split_is_validated_once(make) -> None:
    folds, _ = prepare_folds(Divided(make), 3, 4)
    study, _ = prepare_splits(Divided(make), 3)
    kept = rows_of(study.train) | rows_of(study.val)
    assert sorted(row for fold in folds for row in rows_of(fold.val)) == sorted(kept)
    assert all(rows_of(fold.train) == kept - rows_of(fold.val) for fold in folds)
    assert all(rows_of(fold.test) == rows_of(study.test) for fold in folds)


def test_a_fold_keeps_the_classes_and_divides_no_group() -> None:
    for fold in prepare_folds(Divided(by_class), 0, 4)[0]:
        counts = np.bincount(fold.val.y.numpy(), minlength=4)
        assert counts.max() - counts.min() <= 1
    for fold in prepare_folds(Divided(by_group), 0, 4)[0]:
        assert not set(GROUPS[list(rows_of(fold.val))]) & set(GROUPS[list(rows_of(fold.train))])
        assert fold.blocks is not None
        assert len(fold.blocks.numbers) == len(fold.val)


def test_a_fold_by_time_is_validated_on_later_samples() -> None:
    folds, _ = prepare_folds(Divided(by_time), 0, 4)
    times = [(TIMES[list(rows_of(fold.train))], TIMES[list(rows_of(fold.val))]) for fold in folds]
    assert all(train.max() < val.min() for train, val in times)
    assert all(val.max() < later.min() for (_, val), (_, later) in itertools.pairwise(times))
    assert min(len(train) for train, _ in times) >= len(folds[-1].train) / 2


def test_another_seed_gives_another_division_with_the_same_test_split() -> None:
    objective, fold = Divided(by_class), Fold(1, 4)
    study, _ = prepare_splits(objective, 3, None, fold)
    other, _ = prepare_splits(objective, 3, 77, fold)
    assert rows_of(other.test) == rows_of(study.test)
    assert rows_of(other.val) != rows_of(study.val)
    assert prepare_splits(objective, 3, 77, fold)[0] is other


@pytest.mark.parametrize(
    ("make", "count", "said"),
    [
        (
            by_class,
            40,
            "--folds 40 needs at least 40 samples of the rarest class, but there are 12; use stratify=False",
        ),
        (by_group, 40, "--folds 40 needs at least 40 groups, but there are 16; use fewer folds"),
        (by_value, 49, "--folds 49 needs at least 49 samples, but there are 48; use fewer folds"),
        (by_time, 13, "13 folds by time need 26 distinct times, not 24"),
        (lambda _: FIXED, 3, r"call Splits.make\(\) in each call of data\(\), or remove --folds"),
    ],
)
def test_data_that_cannot_be_divided_is_an_error(make, count, said) -> None:
    with pytest.raises(ObjectiveError, match=said):
        prepare_folds(Divided(make), 0, count)


def test_a_test_split_that_depends_on_the_fold_is_an_error() -> None:
    def scaled(seed):
        splits = by_value(seed)
        mean = splits.train.x.mean()
        return Splits(*(replace(part, x=part.x - mean) for _, part in splits.parts()))

    with pytest.raises(ObjectiveError, match="transform them in model"):
        prepare_folds(Divided(scaled), 0, 3)
