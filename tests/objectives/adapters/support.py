"""Runs that are stopped again and again, beside one that nobody disturbed."""

import torch

from hpsearch import LocalSession
from hpsearch.objectives.fit import fit
from tests.objectives.training.support import Stopped, exact


def trained(objective, session, *, epochs=5):
    return fit(objective, objective.default_config(), epochs=epochs, seed=7, session=session, device="cpu")


def assert_resumed_exactly(objective, folder, *, after=(0, 1, 3), epochs=5):
    """A run that is left after each of these epochs is the undisturbed one, to the last bit."""
    whole = trained(objective, LocalSession(folder / "whole"), epochs=epochs)
    for epoch in after:
        stopped = trained(objective, Stopped(folder / "parts", epoch), epochs=epochs)
        assert (stopped.status, len(stopped.history)) == ("stopped", epoch + 1)
    resumed = trained(objective, LocalSession(folder / "parts"), epochs=epochs)
    assert exact(resumed.history) == exact(whole.history)
    assert all(torch.equal(resumed.best[name], weights) for name, weights in whole.best.items())
    return whole
