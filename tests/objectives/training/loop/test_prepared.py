import torch

from objectives.training.loop.prepared import prepared_splits
from tests.objectives.training.support import exact, fit


def _counting(objective_with, **replaced):
    calls = []

    def data(self, seed):
        calls.append(seed)
        return type(self).__mro__[1].data(self, seed)

    return objective_with(data=data, **replaced), calls


def test_data_are_made_once_for_a_seed(objective_with):
    objective, calls = _counting(objective_with)
    first = fit(objective, split_seed=3, epochs=1)
    again = fit(objective, split_seed=3, epochs=1)
    assert calls == [3]
    assert exact(first.history) == exact(again.history)
    assert prepared_splits(objective, 4)[1] != first.split_hash
    assert calls == [3, 4]


def test_data_that_the_objectives_code_changed_are_made_again(objective_with):
    def model(self, config, train):
        train.x.add_(1.0)
        return type(self).__mro__[1].model(self, config, train)

    objective, calls = _counting(objective_with, model=model)
    first, again = (fit(objective, epochs=2) for _ in range(2))
    assert calls == [0, 0]
    assert first.split_hash == again.split_hash
    assert exact(first.history) == exact(again.history)
    assert torch.equal(first.val.x, again.val.x)
