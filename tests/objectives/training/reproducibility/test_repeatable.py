"""Equal seeds give equal runs, and a run does not change global state of the process."""

import logging
import os
import random

import numpy as np
import pytest
import torch
from torch import nn

from hpsearch import ObjectiveError, Splits, TrainConfig
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.loop.build import build_run
from hpsearch.objectives.training.reproducibility.seeds import keep_torch_defaults, seed_temporarily, set_seed
from tests.objectives.training.support import fit


def test_equal_seeds_give_equal_runs_and_different_ones_do_not(wine):
    def losses(**settings):
        return [record.metrics["val_loss"] for record in fit(wine, **settings).history]

    first = losses()
    torch.manual_seed(5)
    assert losses() == first
    assert losses(seed=1) != first
    assert losses(seed=1, split_seed=0) != first
    assert fit(wine, seed=1, split_seed=0).split_hash == fit(wine).split_hash != fit(wine, seed=1).split_hash


def test_initial_weights_depend_on_the_seed_and_the_split_on_the_study(wine):
    def built(seed, split_seed):
        config, cpu = TrainConfig(), torch.device("cpu")
        run, _ = build_run(wine, config, RunPlan(1, seed, split_seed), device=cpu)
        return run.model[1][0].weight, run.identity["split_hash"]

    def same(one, other):
        return torch.equal(one[0], other[0]), one[1] == other[1]

    assert same(built(0, 0), built(0, 0)) == (True, True)
    assert same(built(0, 0), built(0, 1)) == (True, False)
    assert same(built(0, 0), built(1, 0)) == (False, True)


def test_data_that_use_a_global_generator_are_repeatable(objective_with):
    def data(_self, _seed):
        order = torch.randperm(60).numpy() + np.random.permutation(60)
        return Splits.make(np.zeros((60, 13)) + order[:, None], np.arange(60) % 3, seed=random.randrange(1000))

    objective = objective_with(data=data)
    first = fit(objective, epochs=1, split_seed=2)
    torch.rand(1), np.random.rand(), random.random()
    assert fit(objective, epochs=1, split_seed=2, seed=9).split_hash == first.split_hash


def test_the_process_keeps_its_random_state_and_switches(wine):
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    fit(wine)
    assert not torch.are_deterministic_algorithms_enabled()
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected
    assert not logging.getLogger("hpsearch.objectives.training").handlers


def test_deterministic_kernels_are_on_during_training(objective_with):
    seen = []

    def model(_self, _config, _train):
        net = nn.Linear(13, 3)
        net.register_forward_hook(lambda *_: seen.append(torch.are_deterministic_algorithms_enabled()))
        return net

    fit(objective_with(model=model), epochs=1)
    assert set(seen) == {True}
    seen.clear()
    fit(objective_with(model=model), TrainConfig(deterministic=False), epochs=1)
    assert set(seen) == {False}


def test_an_operation_without_a_deterministic_kernel_is_an_error(objective_with):
    class Puts(nn.Linear):
        def forward(self, x):
            output = super().forward(x)
            if self.training:  # evaluation runs first and would raise the same error
                output.clone().put_(torch.zeros(1, dtype=torch.long, device=x.device), output.new_zeros(1))
            return output

    objective = objective_with(model=lambda *_: Puts(13, 3))
    with pytest.raises(ObjectiveError, match=r"^put_ does not have .*; set deterministic=False in the TrainConfig$"):
        fit(objective)
    assert fit(objective, TrainConfig(deterministic=False)).status == "completed"


def test_cuda_is_configured_for_determinism_before_it_starts(objective_with, monkeypatch):
    """cuDNN's benchmark can select other kernels in each run. cuBLAS reads its setting once, at the start of CUDA."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    at_first_use, seen = [], []
    original = torch.empty

    def empty(*args, **settings):
        at_first_use.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
        return original(*args, **settings)

    monkeypatch.setattr(torch, "empty", empty)

    def model(_self, _config, _train):
        net = nn.Linear(13, 3)
        net.register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.benchmark))
        return net

    fit(objective_with(model=model), epochs=1)
    assert at_first_use[0] == ":4096:8"
    assert set(seen) == {False}
    assert torch.backends.cudnn.benchmark, "as it was before"


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(()).item()])
def test_every_generator_is_seeded_by_the_epoch(draw):
    def drawn(*parts):
        set_seed(*parts)
        return draw()

    assert drawn(3, "epoch", 1) == drawn(3, "epoch", 1)
    assert len({drawn(3, "epoch", 1), drawn(3, "epoch", 2), drawn(4, "epoch", 1)}) == 3


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(()).item()])
def test_a_seeded_block_is_repeatable_and_does_not_affect_other_code(draw):
    set_seed(0)
    draw()
    expected = draw()
    set_seed(0)
    draw()
    with seed_temporarily(7, "augment", 1):
        first = draw()
    assert draw() == expected
    with seed_temporarily(7, "augment", 1):
        assert draw() == first


def test_changed_defaults_of_torch_are_restored():
    with keep_torch_defaults():
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
    assert torch.zeros(1).dtype == torch.float32
    assert torch.zeros(1).device.type == "cpu"
