"""Compare the training loop with loops written by hand. Not collected by default:

./hpsearch test benchmarks/bench_training.py -s
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.training_loops import (
    DEVICES,
    FASTER,
    bare,
    ratio,
    tutorial,
    tutorial_fused,
    tutorial_of_arrays,
    tutorial_with_transform,
)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("net", ["mlp", "cnn"])
def test_loop_is_at_most_5_percent_slower_than_a_bare_loop(net, device):
    assert ratio(net, bare, device) >= 0.95


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("other", "times"),
    [(tutorial, 1.5), (tutorial_fused, 1.2), (tutorial_with_transform, 1.5), (tutorial_of_arrays, 1.0)],
)
def test_loop_is_faster_than_loops_of_tutorials(other, times, device):
    assert ratio("mlp", other, device) >= times


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("net", ["mlp", "cnn"])
@pytest.mark.parametrize("settings", FASTER)
def test_loop_is_at_most_5_percent_slower_on_a_gpu_with_bf16_and_compilation(net, settings):
    assert ratio(net, bare, "cuda", **settings) >= 0.95
