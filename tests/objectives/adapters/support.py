"""Compare runs that are stopped and resumed repeatedly with an uninterrupted run."""

import torch
from torch import nn

from hpsearch import LocalSession
from hpsearch.objectives.fit import fit
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.ranks import current_ranks
from tests.objectives.custom_loop.support import whole_and_resumed
from tests.objectives.training.support import Stopped, exact


def trained(objective, session, *, epochs=5):
    return fit(objective, objective.default_config(), RunPlan(epochs, 7, 7), session=session, device="cpu")


def assert_resumed_exactly(objective, folder, *, after=(0, 1, 3), epochs=5):
    """Assert that a run that is stopped after each of these epochs is bit-identical to an uninterrupted one."""
    whole = trained(objective, LocalSession(folder / "whole"), epochs=epochs)
    for epoch in after:
        stopped = trained(objective, Stopped(folder / "parts", epoch), epochs=epochs)
        assert (stopped.status, len(stopped.history)) == ("stopped", epoch + 1)
    resumed = trained(objective, LocalSession(folder / "parts"), epochs=epochs)
    assert exact(resumed.history) == exact(whole.history)
    assert all(torch.equal(resumed.best[name], weights) for name, weights in whole.best.items())
    return whole


def assert_one_model(model):
    """Assert that both ranks have the same weights."""
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    first, second = current_ranks().all_gather_object(weights)
    assert torch.equal(first, second)


def assert_resumed_on_two_ranks(objective, folder):
    """Assert that a run of two ranks, resumed in new processes, equals the uninterrupted one."""
    (whole, _), (resumed, _) = whole_and_resumed(objective, folder)
    assert whole == resumed
    assert (whole[0], len(whole[1])) == ("completed", 3)
