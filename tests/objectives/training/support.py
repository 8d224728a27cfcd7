"""What several tests of the training loop share."""

import torch

from objectives.training.build import build
from objectives.training.reproducibility import set_seed


def started(objective, config, *, epochs=3, seed=0):
    """A run on the CPU, built and seeded as its first epoch is."""
    run, _ = build(objective, config, epochs=epochs, seed=seed, split_seed=0, device=torch.device("cpu"))
    set_seed(seed, "epoch", 0)
    return run


TIMED = ("epoch_seconds", "samples_per_second")


def exact(history):
    """What of a history repeats to the last bit."""
    return [(r.epoch, {k: v for k, v in r.metrics.items() if k not in TIMED}) for r in history]


def same_result(found, expected):
    """Asserts that two runs came to the same numbers and the same weights, to the last bit."""
    assert exact(found.history) == exact(expected.history)
    assert (found.best_epoch, found.best_value) == (expected.best_epoch, expected.best_value)
    weights = expected.model.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in found.model.state_dict().items())
