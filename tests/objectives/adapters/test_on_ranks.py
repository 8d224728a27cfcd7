"""Trainers of other libraries on two ranks: they train one model together, and go on with it in new processes."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer

from hpsearch.objectives.adapters import lightning
from hpsearch.objectives.adapters.transformers import train
from hpsearch.objectives.training.ranks import current
from tests.objectives.adapters import test_lightning, test_transformers
from tests.objectives.own_loop.support import whole_and_resumed


class Wines(test_lightning.Wines):
    def run(self, trial):
        net, rows = test_lightning.Net(trial.config["lr"]), (slice(0, 110), slice(110, 140))
        net.scheduler = "cycle"
        loaders = [DataLoader(test_lightning.Noisy(part), batch_size=16, shuffle=part.start == 0) for part in rows]
        lightning.fit(trial, net, tuple(loaders))
        assert_one_model(net)
        assert net.trainer.world_size == 2


class Sums(test_transformers.Sums):
    def run(self, trial):
        data = {"train_dataset": test_transformers.rows(0, 96), "eval_dataset": test_transformers.rows(1, 64)}
        trainer = Trainer(test_transformers.Net(), self.arguments(trial), **data)
        train(trial, trainer)
        assert_one_model(trainer.model)
        assert trainer.state.max_steps == 3 * 96 // 16 // 2


def assert_one_model(model):
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    first, second = current().each(weights)
    assert torch.equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("objective", [Wines(), type("Sums", (Sums,), {"metric": "loss", "direction": "minimize"})()])
def test_it_is_resumed_on_two_ranks(objective, tmp_path):
    (whole, _), (resumed, _) = whole_and_resumed(objective, tmp_path)
    assert whole == resumed
    assert (whole[0], len(whole[1])) == ("completed", 3)
