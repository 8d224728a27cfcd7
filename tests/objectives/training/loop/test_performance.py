"""Performance settings do not change the results."""

import sysconfig
from pathlib import Path

import pytest
import torch
from torch import nn

from hpsearch import LocalSession, TrainConfig, Trainer, Verdict, load_objective
from hpsearch.objectives.training.loop.measure_model import get_peak_memory
from tests.objectives.training.support import exact, same_result, started

CNN = {"kind": "cnn", "layers": 2, "width": 8, "dropout": 0.2}
MLP = {"kind": "mlp", "layers": 3, "width": 16, "dropout": 0.2}

needs_headers = pytest.mark.skipif(
    not Path(sysconfig.get_paths()["include"], "Python.h").exists(), reason="needs Python's headers to compile with"
)


def _without_cpp(monkeypatch):
    """Skip the C++ compilation of the graphs, which takes 15 s and is torch's own work."""
    import torch._inductor.compile_fx
    from torch._dynamo.backends.debugging import aot_eager

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", lambda graph, inputs, **_: aot_eager(graph, inputs))


def _fit(objective, config, epochs=2):
    return Trainer(objective, config, epochs=epochs, seed=0).fit()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"ema_decay": 0.9}, {"swa_fraction": 0.5}])
def test_activation_checkpointing_changes_no_bit_of_the_run(settings):
    digits = load_objective("digits")
    plain = _fit(digits, TrainConfig(model=MLP, **settings))
    recomputed = _fit(digits, TrainConfig(model=MLP, activation_checkpointing=True, **settings))
    same_result(recomputed, plain)
    assert not any("forward" in vars(module) for module in recomputed.model.modules())
    torch.export.export(recomputed.model, (recomputed.example.x,))


def test_activation_checkpointing_keeps_a_custom_forward(objective_with):
    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(13, 3)
            self.forward = self.classify

        def classify(self, x):
            return self.net(x)

    result = _fit(objective_with(model=lambda *_: Chosen()), TrainConfig(ema_decay=0.9), epochs=1)
    assert result.model(result.example.x).shape == (4, 3)


def test_activations_are_recomputed_except_for_batch_norm():
    calls = {"linear": 0, "norm": 0}
    run = started(load_objective("digits"), TrainConfig(model=MLP, activation_checkpointing=True))
    linear = next(module for module in run.model.modules() if isinstance(module, nn.Linear))
    linear.register_forward_pre_hook(lambda *_: calls.__setitem__("linear", calls["linear"] + 1))
    hooked = linear.forward.args[0].__self__
    assert hooked is linear
    x = run.splits.train.x[:8].requires_grad_()
    seen = []
    original = torch.nn.functional.linear
    try:
        torch.nn.functional.linear = lambda *args: (seen.append(args[0].shape), original(*args))[1]
        run.model.train()(x).sum().backward()
    finally:
        torch.nn.functional.linear = original
    assert len(seen) == 2 * 4, "four linear layers, each in the forward and again in the backward pass"
    cnn = started(load_objective("digits"), TrainConfig(model=CNN, activation_checkpointing=True))
    norms = [module for module in cnn.model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    assert not any("forward" in vars(module) for module in norms)


def test_channels_last_applies_to_convolutions_but_not_to_the_result():
    config = TrainConfig(model=CNN, channels_last=True)
    run = started(load_objective("digits"), config)
    convolutions = [module for module in run.model.modules() if isinstance(module, nn.Conv2d)]
    assert all(c.weight.is_contiguous(memory_format=torch.channels_last) for c in convolutions)
    result = _fit(load_objective("digits"), config)
    plain = _fit(load_objective("digits"), TrainConfig(model=CNN))
    assert result.history[-1].metrics["val_loss"] == pytest.approx(plain.history[-1].metrics["val_loss"], rel=0.2)
    assert all(tensor.is_contiguous() for tensor in result.model.state_dict().values())


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["traced alone", pytest.param("compiled to C++", marks=[needs_headers, pytest.mark.soak])]
)
def test_a_model_is_compiled_on_request(wine, monkeypatch, backend):
    if backend == "traced alone":
        _without_cpp(monkeypatch)
    plain = _fit(wine, TrainConfig(batch_size=16), epochs=3)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    result = _fit(wine, TrainConfig(batch_size=16, compile=True), epochs=3)
    assert result.resume_note is None
    stats = torch._dynamo.utils.counters["stats"]
    assert 1 <= stats["unique_graphs"] <= 4, "for training and evaluation, whole batches and the last one"
    for one, other in zip(exact(result.history), exact(plain.history), strict=True):
        assert one[1] == pytest.approx(other[1], rel=1e-3, abs=1e-3)
    assert set(result.model.state_dict()) == set(plain.model.state_dict()), "no names of a wrapper"
    assert all(module._compiled_call_impl is None for module in result.model.modules())


@pytest.mark.slow
def test_a_run_continues_with_a_warning_if_compilation_fails(wine, monkeypatch, tmp_path):
    def broken(*_args, **_kwargs):
        raise RuntimeError("no compiler here\nand a long trace")

    import torch._inductor.compile_fx

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", broken)
    result = Trainer(wine, TrainConfig(compile=True), epochs=2, seed=0, run_dir=tmp_path).fit()
    assert result.resume_note is not None
    assert result.resume_note.startswith("model not compiled: ")
    assert "no compiler here" in result.resume_note
    assert "not compiled" in (tmp_path / "train.log").read_text()
    assert "not compiled" in (tmp_path / "report.md").read_text()
    same_result(result, _fit(wine, TrainConfig(), epochs=2))


@pytest.mark.parametrize("precision", ["highest", "high", "medium", None])
def test_matmul_precision_is_set_only_during_the_run(objective_with, precision):
    seen = []

    def model(_self, _config, _train):
        net = nn.Linear(13, 3)
        net.register_forward_hook(lambda *_: seen.append(torch.get_float32_matmul_precision()))
        return net

    before = torch.get_float32_matmul_precision()
    config = TrainConfig() if precision is None else TrainConfig(matmul_precision=precision)
    _fit(objective_with(model=model), config, epochs=1)
    assert set(seen) == {precision or "high"}
    assert torch.get_float32_matmul_precision() == before


def test_memory_is_measured_on_devices_with_their_own_memory(wine):
    assert get_peak_memory(torch.device("cpu")) is None
    result = _fit(wine, TrainConfig(), epochs=1)
    assert result.memory is None
    assert "peak_memory_bytes" not in result.history[0].metrics


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_peak_memory_is_recorded_on_a_gpu(wine):
    result = Trainer(wine, TrainConfig(), epochs=1, seed=0, device="cuda").fit()
    assert result.memory
    assert result.history[0].metrics["peak_memory_bytes"] > 0


@pytest.mark.soak
@pytest.mark.slow
def test_a_run_resumed_without_compilation_is_marked_not_exact(wine, monkeypatch, tmp_path):
    _without_cpp(monkeypatch)

    class Stopping(LocalSession):
        def report(self, record):
            super().report(record)
            return Verdict.STOP

    config = TrainConfig(compile=True)
    first = Trainer(wine, config, epochs=2, seed=0, session=Stopping(tmp_path)).fit()
    assert (first.status, first.resume_note) == ("stopped", None)

    def broken(*_args, **_kwargs):
        raise RuntimeError("no compiler here")

    import torch._inductor.compile_fx

    torch._dynamo.reset()
    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", broken)
    result = Trainer(wine, config, epochs=2, seed=0, session=LocalSession(tmp_path)).fit()
    assert "results after epoch 1 may differ: compiled True -> False" in result.resume_note
    assert "no compiler here" in result.resume_note


def test_the_memory_of_a_device_is_recorded_and_reported(wine, monkeypatch, tmp_path):
    """The path of the number can be tested without a GPU."""
    from hpsearch.objectives.training import trainer
    from hpsearch.objectives.training import trainer as conclude

    assert trainer.get_peak_memory is conclude.get_peak_memory is get_peak_memory
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5 * 2**20)
    assert get_peak_memory(torch.device("cuda:1")) == 5 * 2**20
    for module in (trainer, conclude):
        monkeypatch.setattr(module, "get_peak_memory", lambda _device: get_peak_memory(torch.device("cuda")))
    found = Trainer(wine, TrainConfig(), epochs=1, seed=0, run_dir=tmp_path).fit()
    assert found.memory == found.history[0].metrics["peak_memory_bytes"] == 5 * 2**20
    assert "peak device memory 5 MiB" in (tmp_path / "report.md").read_text()
