import dataclasses
import threading

import torch

from hpsearch import Dataset, Splits
from hpsearch.objectives.training.loop.prepare import is_resplit, prepare_splits
from tests.objectives.training.support import exact, fit


def _counting(objective_with, **replaced):
    calls = []

    def data(self, seed):
        calls.append(seed)
        return type(self).__mro__[1].data(self, seed)

    return objective_with(data=data, **replaced), calls


def test_data_are_created_once_per_seed(objective_with):
    objective, calls = _counting(objective_with)
    first = fit(objective, split_seed=3, epochs=1)
    again = fit(objective, split_seed=3, epochs=1)
    assert calls == [3]
    assert exact(first.history) == exact(again.history)
    assert prepare_splits(objective, 4)[1] != first.split_hash
    assert calls == [3, 4]


def test_an_objective_without_a_hash_may_be_trained(wine):
    """As a dataclass, whose objects are compared by their fields."""
    unhashable = dataclasses.dataclass(type("Unhashable", (type(wine),), {}))()
    assert type(unhashable).__hash__ is None
    assert fit(unhashable, epochs=1).status == "completed"


def test_data_that_the_objective_modified_are_created_again(objective_with):
    def model(self, config, train):
        train.x.numpy()[:] += 1.0  # PyTorch does not count this change
        return type(self).__mro__[1].model(self, config, train)

    objective, calls = _counting(objective_with, model=model)
    first, again = (fit(objective, epochs=2) for _ in range(2))
    assert calls == [0, 0]
    assert first.split_hash == again.split_hash
    assert exact(first.history) == exact(again.history)
    assert torch.equal(first.val.x, again.val.x)


def test_a_new_split_is_compared_with_that_of_the_study(objective_with):
    objective, calls = _counting(objective_with)
    own, _ = prepare_splits(objective, 3)
    assert calls == [3]
    splits, _ = prepare_splits(objective, 3, 77)
    assert calls == [3, 3, 3], "its own once more, to compare the test split with, and the fresh one"
    assert splits.hash_of("test") == own.hash_of("test")
    assert is_resplit(objective, 3, splits)
    prepare_splits(objective, 3, 77)
    prepare_splits(objective, 3, 78)
    assert calls == [3] * 4, "the other half of the comparison is kept"


def test_splits_that_the_objective_fixes_are_kept(objective_with):
    def fixed(self, seed):
        parts = [torch.arange(n, n + 30) for n in (0, 30, 60)]
        x = torch.randn(90, 13, generator=torch.Generator().manual_seed(0))
        return Splits(*(Dataset(x[part], part % 3, part) for part in parts))

    objective = objective_with(data=fixed)
    splits, _ = prepare_splits(objective, 3, 77)
    assert not is_resplit(objective, 3, splits)
    result = fit(objective, split_seed=3, resplit_seed=77, epochs=2)
    assert (result.resplit_score.has_new_split, len(result.resplit_score.epochs)) == (False, 2), (
        "the choice of the epoch is cross-fitted yet"
    )


def test_scaling_in_data_is_fitted_for_each_split(objective_with):
    def data(self, seed):
        splits = type(self).__mro__[1].data(self, seed)
        mean = splits.train.x.mean(0)
        return Splits(*(Dataset(part.x - mean, part.y, part.rows) for _, part in splits.parts()))

    objective = objective_with(data=data)
    own, _ = prepare_splits(objective, 3)
    splits, _ = prepare_splits(objective, 3, 77)
    assert splits.train.x.mean(0).abs().max() < 1e-3
    assert splits.hash_of("test") != own.hash_of("test"), "the same samples, on another scale"
    assert torch.equal(splits.test.rows, own.test.rows)


def test_scaled_splits_without_row_numbers_are_matched_by_labels(objective_with):
    def data(self, seed):
        splits = type(self).__mro__[1].data(self, seed)
        mean = splits.train.x.mean(0)
        return Splits(*(Dataset(part.x - mean, part.y) for _, part in splits.parts()))

    objective = objective_with(data=data)
    splits, _ = prepare_splits(objective, 3, 77)
    assert is_resplit(objective, 3, splits)


def test_metrics_that_cannot_be_copied_are_created_again(objective_with):
    class Own:
        def __init__(self):
            self.lock, self.right, self.count = threading.Lock(), 0, 0

        def update(self, output, target):
            self.right += int((output.argmax(1) == target).sum())
            self.count += len(target)

        def compute(self):
            return {"accuracy": self.right / self.count}

        def reset(self):
            self.right = self.count = 0

    result = fit(objective_with(metrics=lambda self, train: Own()), split_seed=3, resplit_seed=77, epochs=2)
    assert result.resplit_score.error > 0


def test_the_split_of_the_study_is_kept_if_the_test_split_would_change(objective_with, caplog):
    def data(self, seed):
        splits = type(self).__mro__[1].data(self, seed)
        return Splits(splits.train, splits.test, splits.val)  # in the wrong order

    objective = objective_with(data=data)
    own = prepare_splits(objective, 3)
    found = prepare_splits(objective, 3, 77)
    assert found[1] == own[1]
    assert not is_resplit(objective, 3, found[0])
    assert "using the study's split instead of a new one, because data() changes the test split from " in caplog.text
