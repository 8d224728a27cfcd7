"""Model metrics such as latency and size: their values, and that measuring them does not change a run."""

import json
import math
import time

import pytest
import torch
from torch import nn

from hpsearch import NonFiniteError, ObjectiveError, Step, TrainConfig
from hpsearch.objectives.errors import MetricError
from hpsearch.objectives.model_metric_names import MODEL_METRICS
from hpsearch.objectives.training.checks.smoke import run_smoke_test
from hpsearch.objectives.training.loop.measure_model import (
    apply_memory_format,
    measure_latency_ms,
    measure_size,
    unwrap_temporarily,
)
from tests.objectives.training.support import DiedError, Dying, Stopped, Wine, fit, raise_died, same_result

CPU = torch.device("cpu")
MEASURES = {"latency_ms", "latency_load", "model_mb", "parameters"}


class Noted(nn.Module):
    """Records its calls. In evaluation mode it sleeps for `seconds(number of the call)`."""

    def __init__(self, seconds=lambda _: 0.0):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(13, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        self.seconds, self.calls = seconds, []

    def forward(self, x):
        self.calls.append((len(x), self.training, not torch.is_grad_enabled(), torch.get_num_threads()))
        if not self.training and len(x) == 1:
            time.sleep(self.seconds(sum(size == 1 for size, *_ in self.calls)))
        return self.net(x)


def asking(*names, **replaced):
    objective = type("Changed", (Wine,), replaced)()
    objective.set_reported_metrics(names)
    return objective


def noted(*names, seconds=lambda _: 0.0, **replaced):
    """An objective whose last model is at hand."""
    made = []

    def model(self, config, train):
        made.append(Noted(seconds))
        return made[-1]

    return asking(*names, model=model, **replaced), made


def test_only_requested_model_metrics_are_measured():
    assert not fit(Wine(), epochs=1).history[0].metrics.keys() & {*MODEL_METRICS, *MEASURES}
    metrics = fit(asking("parameters", "macro_f1"), epochs=1).history[0].metrics
    assert metrics.keys() & {*MODEL_METRICS, *MEASURES} == {"parameters"}
    assert metrics["parameters"] == 13 * 16 + 16 + 16 * 3 + 3


def test_sizes_count_shared_parameters_once_and_include_buffers_in_bytes():
    shared = nn.Linear(10, 10, bias=False)
    model = nn.Sequential(shared, shared, nn.BatchNorm1d(10), nn.Linear(10, 1).half().requires_grad_(False))
    parameters, buffers = 100 + 20 + 11, 20 * 4 + 8
    assert measure_size(model) == {"parameters": parameters, "model_mb": ((100 + 20) * 4 + 11 * 2 + buffers) / 1e6}


@pytest.mark.parametrize("average", [{}, {"ema_decay": 0.9}, {"swa_fraction": 0.9}])
def test_averaged_weights_are_counted_once(average):
    result = fit(asking("model_mb", "parameters"), TrainConfig(lr=0.02, **average), epochs=2)
    found = result.history[-1].metrics
    assert {name: found[name] for name in ("model_mb", "parameters")} == measure_size(result.model)


def test_latency_is_measured_with_one_sample_in_evaluation_mode():
    objective, made = noted("latency_ms")
    metrics = fit(objective, epochs=2).history[0].metrics
    ones = {call for call in made[-1].calls if call[0] == 1}
    assert ones == {(1, False, True, torch.get_num_threads())}
    assert metrics["latency_ms"] > 0
    assert metrics["latency_load"] >= 0


def test_latency_of_a_batch():
    objective, made = noted("latency_ms", latency_batch=500)  # more than there are
    fit(objective, epochs=1)
    assert sum(size == 500 for size, *_ in made[-1].calls) >= 35


@pytest.mark.parametrize("size", [0, 2.5, "1"])
def test_an_invalid_latency_batch_is_rejected(size):
    with pytest.raises(ObjectiveError, match="latency_batch must be an integer of at least 1"):
        fit(asking("latency_ms", latency_batch=size), epochs=1)


@pytest.mark.soak
def test_the_latency_of_a_slow_model_needs_few_calls():
    objective, made = noted("latency_ms", seconds=lambda _: 0.02)
    assert fit(objective, epochs=1).history[0].metrics["latency_ms"] >= 20
    objective, made = noted("latency_ms", seconds=lambda _: 0.6)
    assert fit(objective, epochs=1).history[0].metrics["latency_ms"] >= 600
    assert sum(size == 1 for size, *_ in made[-1].calls) == 1 + 1 + 5  # before training, to warm up, timed


def test_the_first_calls_do_not_count_for_the_latency():
    objective, _ = noted("latency_ms", seconds=lambda call: 0.2 if call <= 3 else 0.0)
    assert fit(objective, epochs=1).history[0].metrics["latency_ms"] < 100


def test_a_larger_model_has_a_higher_latency():
    wide, narrow = nn.Linear(3000, 3000), nn.Linear(30, 30)
    with torch.inference_mode():
        x = torch.ones(1, 3000)
        assert measure_latency_ms(lambda: wide(x), CPU) > measure_latency_ms(lambda: narrow(x[:, :30]), CPU)


CONFIGS = {
    "plain": TrainConfig(lr=0.02, batch_size=32),
    "averaged": TrainConfig(lr=0.02, batch_size=32, ema_decay=0.9),
    "recomputing": TrainConfig(lr=0.02, batch_size=32, activation_checkpointing=True),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_run_is_bit_identical_with_and_without_model_metrics(config):
    def drawing(self, model, config):
        return {"drawn": float(torch.rand(1)), "training": float(model.training)}

    found = fit(noted("latency_ms", "model_mb", "drawn", model_metrics=drawing)[0], config, epochs=3)
    plain = fit(noted()[0], config, epochs=3)
    beside = {*MEASURES, "drawn", "training"}
    assert {record.metrics["training"] for record in found.history} == {0.0}
    assert len({record.metrics["drawn"] for record in found.history}) == 1
    for record in found.history:
        assert {name for name in record.metrics if name in beside} == beside - {"parameters"}
        for name in beside:
            record.metrics.pop(name, None)
    same_result(found, plain)


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize("point", ["unreported", "reported"])
def test_a_resumed_run_keeps_its_latency(tmp_path, point):
    objective, _ = noted("latency_ms", "model_mb")
    with pytest.raises(DiedError):
        fit(objective, epochs=3, session=Dying(tmp_path, 1, point, raise_died))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    again, made = noted("latency_ms", "model_mb")
    result = fit(again, epochs=3, run_dir=tmp_path)
    assert len(result.history) == 3
    for name in ("latency_ms", "latency_load", "model_mb"):
        assert {record.metrics[name] for record in result.history} == {json.loads(lines[0])[name]}
    assert sum(size == 1 for size, *_ in made[-1].calls) == 1  # it was tried before training, and not timed again
    assert result.best_metrics["latency_ms"] == result.history[0].metrics["latency_ms"]


@pytest.mark.usefixtures("no_plots")
def test_a_run_resumed_from_a_checkpoint_without_model_metrics_measures_them(tmp_path):
    fit(asking(), epochs=3, session=Stopped(tmp_path, 0))
    result = fit(asking("latency_ms"), epochs=3, run_dir=tmp_path)
    assert ["latency_ms" in record.metrics for record in result.history] == [False, True, True]


def test_custom_model_metrics_are_reported_as_floats():
    def model_metrics(self, model, config):
        with torch.no_grad():
            return {"norm": float(sum(p.square().sum() for p in model.parameters())), "of_lr": config.lr, "count": 3}

    metrics = fit(asking("norm", model_metrics=model_metrics), epochs=1).history[0].metrics
    assert metrics["norm"] > 0
    assert (metrics["of_lr"], metrics["count"]) == (0.02, 3.0)


def test_model_metrics_that_change_the_model_are_an_error():
    def model_metrics(self, model, config):
        return {"norm": float(sum(p.detach().zero_().sum() for p in model.parameters()))}

    with pytest.raises(ObjectiveError, match=r"Changed.model_metrics changes the model: .*; use a copy.deepcopy"):
        fit(asking("norm", model_metrics=model_metrics), epochs=1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"norm": torch.ones(1)}, "Changed.model_metrics: 'norm' must be a float, not Tensor; return float(...)"),
        ({"norm": None}, "Changed.model_metrics: 'norm' must be a float, not NoneType; return float(...)"),
        ([1.0], "Changed.model_metrics must return a dict such as {'size_mb': 1.5}, not list"),
        *(
            ({name: 1.0}, f"Changed.model_metrics: {name!r} is a reserved or invalid metric name; choose another name")
            for name in ("accuracy", "loss", "latency_ms", "latency_load", "lr", "val_norm", "train_loss", 3, "")
        ),
    ],
)
def test_invalid_custom_model_metrics_are_an_error_before_training(given, said):
    with pytest.raises(ObjectiveError) as error:
        fit(asking(model_metrics=lambda self, model, config: given), epochs=1)
    assert str(error.value) == said


def test_an_error_in_custom_model_metrics_has_its_line():
    def model_metrics(self, model, config):
        return {"norm": 1 / 0}

    with pytest.raises(ObjectiveError, match=r"Changed.model_metrics: .*test_measuring.py:\d+: ZeroDivisionError"):
        fit(asking(model_metrics=model_metrics), epochs=1)


def test_a_non_finite_model_metric_ends_the_trial():
    calls = []

    def model_metrics(self, model, config):
        calls.append(1)
        return {"norm": math.nan if len(calls) > 2 else 1.0}

    with pytest.raises(NonFiniteError, match="norm is nan at epoch 2"):
        fit(asking(model_metrics=model_metrics), epochs=3)


class Sometimes:
    """Returns additional metrics in its first two calls."""

    def __init__(self, late):
        self.late, self.computed = late, 0

    def update(self, output, target):
        pass

    def reset(self):
        pass

    def compute(self):
        self.computed += 1
        return {"accuracy": 0.5, **({"extra": 1.0} if self.computed <= 1 else self.late)}


def test_a_requested_metric_must_be_finite():
    with pytest.raises(NonFiniteError, match="val_extra is inf at epoch 1"):
        fit(asking("extra", metrics=lambda self, train: Sometimes({"extra": math.inf})), epochs=2)
    fit(asking(metrics=lambda self, train: Sometimes({"extra": math.inf})), epochs=2)  # unless it is not requested


def test_a_requested_metric_must_be_reported_after_every_epoch():
    with pytest.raises(MetricError, match="metric 'extra' is missing after an epoch"):
        fit(asking("extra", metrics=lambda self, train: Sometimes({})), epochs=2)


@pytest.mark.parametrize("how", ["fit", "smoke"])
def test_a_requested_metric_that_does_not_exist_is_an_error_before_training(how):
    objective = asking("extar", metrics=lambda self, train: Sometimes({}))
    with pytest.raises(MetricError) as error:
        fit(objective, epochs=1) if how == "fit" else run_smoke_test(objective)
    assert str(error.value) == "metric 'extar' is not a metric of Changed; did you mean 'extra'?"


def test_a_custom_metric_replaces_the_model_metric_of_its_name():
    class Own(Sometimes):
        def compute(self):
            return {"accuracy": 0.5, "parameters": 7.0}

    metrics = fit(asking("parameters", metrics=lambda self, train: Own({})), epochs=1).history[0].metrics
    assert metrics["val_parameters"] == 7.0
    assert "parameters" not in metrics


def test_gpu_memory_on_a_cpu_is_rejected_except_in_a_smoke_test():
    objective = asking("peak_memory_mb")
    with pytest.raises(ObjectiveError, match="peak_memory_mb is not available on cpu"):
        fit(objective, epochs=1, device="cpu")
    assert run_smoke_test(objective, device=CPU).losses


class Stepping(Wine):
    """A step that calls a part of the model; the model itself takes no inputs alone."""

    def model(self, config, train):
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = nn.Linear(13, 3)

            def forward(self, x, scale):
                return self.net(x) * scale

        return Two()

    def step(self, model, batch, config):
        output = model(batch.x, 1.0)
        return Step(nn.functional.cross_entropy(output, batch.y), outputs=output)


def test_a_model_that_rejects_one_sample_is_an_error_before_training():
    objective = Stepping()
    objective.set_reported_metrics(["model_mb"])
    assert "model_mb" in fit(objective, epochs=1).history[0].metrics
    objective.set_reported_metrics(["latency_ms"])
    with pytest.raises(ObjectiveError, match=r"Stepping\.model, called with 1 sample to measure latency_ms"):
        fit(objective, epochs=1)


def test_training_wrappers_of_a_model_are_removed_while_it_is_measured():
    config = TrainConfig(channels_last=True, activation_checkpointing=True)
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()))
    apply_memory_format(model, config)
    model.compile(backend="eager")
    before = [dict(vars(module)) for module in model.modules()]
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert any("forward" in own for own in before)
    with unwrap_temporarily(model, config):
        assert all("forward" not in vars(module) for module in model.modules())
        assert all(module._compiled_call_impl is None for module in model.modules())
        assert all(p.is_contiguous() for p in model.parameters())
        with torch.inference_mode():
            model(torch.ones(1, 3, 9, 9))
    after = [vars(module) for module in model.modules()]
    for then, now in zip(before, after, strict=True):
        assert then.get("forward") is now.get("forward")
        assert then.get("_compiled_call_impl") is now.get("_compiled_call_impl")
    assert model[1][0].weight.is_contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    model(torch.ones(2, 3, 9, 9)).sum().backward()  # tensors created in inference mode could not be trained
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_memory_is_the_maximum_so_far_also_after_a_resume(tmp_path):
    objective = asking("peak_memory_mb", "latency_ms")
    fit(objective, epochs=3, session=Stopped(tmp_path, 1), device="cuda")
    history = fit(objective, epochs=3, run_dir=tmp_path, device="cuda").history
    peaks = [record.metrics["peak_memory_mb"] for record in history]
    assert 0 < peaks[0] <= peaks[1] <= peaks[2]
    assert peaks[0] >= history[0].metrics["peak_memory_bytes"] / 1e6
    assert len({record.metrics["latency_ms"] for record in history}) == 1
