"""The number of device synchronizations does not grow with the data."""

import pytest
import torch

from hpsearch import Splits, evaluate, load_objective
from hpsearch.objectives.training.loop.epoch import train_epoch
from hpsearch.objectives.training.loop.guards import FiniteGuard
from tests.objectives.training.support import built


class _Reads:
    """Counts the calls that read a tensor from the device, which synchronizes with it."""

    NAMES = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__")

    def __init__(self, monkeypatch):
        self.calls = []
        for name in self.NAMES:
            monkeypatch.setattr(torch.Tensor, name, self._counted(name, getattr(torch.Tensor, name)))

    def _counted(self, name, original):
        def called(tensor, *args, **kwargs):
            if tensor.dtype.is_floating_point:  # the number of averages is kept on the CPU
                self.calls.append(name)
            return original(tensor, *args, **kwargs)

        return called


@pytest.mark.parametrize("settings", [{}, {"ema_decay": 0.9}, {"gradient_accumulation_steps": 2}, {"optimizer": "sgd"}])
def test_an_epoch_synchronizes_with_the_device_a_fixed_number_of_times(objective_with, monkeypatch, settings):
    """For any number of steps, the guard reads once per 16 steps, and the sums are read once."""

    def data(_self, seed):
        torch.manual_seed(seed)
        return Splits.make(torch.randn(2000, 13), torch.arange(2000) % 3, seed=seed)

    run = built(objective_with(data=data), batch_size=8, log_every=10, precision="bf16", **settings)
    run.finite_guard = FiniteGuard(torch.device("cuda"))  # as on an accelerator; the guard itself touches no device
    reads = _Reads(monkeypatch)
    trained = train_epoch(run, 0)
    run.steplog.drain()
    steps = trained.samples // (8 * run.config.gradient_accumulation_steps)
    of_the_guard = -(-steps // 16)
    assert len(reads.calls) <= of_the_guard + 3, reads.calls


@pytest.mark.parametrize("name", ["digits", "breast_cancer"])
def test_the_device_synchronizations_of_an_evaluation_do_not_depend_on_batches(monkeypatch, name):
    objective = load_objective(name)
    run = built(objective, batch_size=8, model=objective.default_config().model)
    counts = []
    for batch_size in (8, 400):
        with monkeypatch.context() as patch:
            reads = _Reads(patch)
            evaluate(run.model, run.val, run.step_function, run.metrics, batch_size=batch_size, device="cpu")
        counts.append(len(reads.calls))
    assert counts[0] == counts[1] <= 2, "the sums, and whether both classes are there"
