"""Measure a model: latency, parameters, size, memory."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from hpsearch.objectives.errors import MetricError, ObjectiveError, suggest_names, wrap_user_errors
from hpsearch.objectives.model_metric_names import MODEL_METRICS
from hpsearch.objectives.objective import Objective, overrides
from hpsearch.objectives.training.config import TrainConfig
from hpsearch.objectives.training.data.dataset import Dataset
from hpsearch.objectives.training.data.tree import Tree, to_device
from hpsearch.objectives.training.evaluation.evaluate import evaluation_mode, is_metric_name
from hpsearch.objectives.training.evaluation.model_state import reject_changes
from hpsearch.objectives.training.evaluation.step import ForwardCall, bind_forward
from hpsearch.objectives.training.optimizers.optimizer import list_layers
from hpsearch.objectives.training.ranks import Ranks
from hpsearch.objectives.training.strategies.base import Strategy

_WARM_UP_CALLS, _TIMED_CALLS, _MIN_CALLS = 5, 30, 5
_MIN_SECONDS, _MAX_SECONDS = 0.2, 0.5  # duration of the timed calls; `_MIN_CALLS` slow calls may take longer


def measure_latency_ms(forward: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a call in ms, after a warm-up; each call is synchronized.

    After 5 warm-up calls the function times at least 30 calls and 0.2 s. Slow calls are timed until 0.5 s have passed,
    but at least 5 times. The calls use the CPU threads of the trial. `torch.utils.benchmark` is not used, because it
    times blocks of calls, which overlap on an accelerator: it measures throughput instead of latency.
    """
    begun = time.perf_counter()
    for _ in range(_WARM_UP_CALLS):
        _time_call(forward, device)
        if time.perf_counter() - begun > _MAX_SECONDS:
            break
    seconds: list[float] = []
    begun, collects = time.perf_counter(), gc.isenabled()
    gc.disable()  # as in timeit: garbage collection is not part of the model
    try:
        while _needs_calls(len(seconds), time.perf_counter() - begun):
            seconds.append(_time_call(forward, device))
    finally:
        if collects:
            gc.enable()
    return statistics.median(seconds) * 1000


def _needs_calls(calls: int, elapsed: float) -> bool:
    return calls < _MIN_CALLS or (elapsed < _MAX_SECONDS and (calls < _TIMED_CALLS or elapsed < _MIN_SECONDS))


def _time_call(forward: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    begun = time.perf_counter()
    forward()
    synchronize(device)
    return time.perf_counter() - begun


def synchronize(device: torch.device) -> None:
    """Wait for pending work of an accelerator."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def get_machine_load() -> dict[str, float]:
    """Return `latency_load`: the load average of the last minute per core; empty if the system does not provide it.

    If the load is above 1, processes wait for cores, and measured times are too long.
    """
    if not hasattr(os, "getloadavg"):
        return {}
    return {"latency_load": os.getloadavg()[0] / (os.cpu_count() or 1)}


def measure_model(model: nn.Module, x: Tree, device: torch.device) -> dict[str, float]:
    """Return `latency_ms`, `latency_load`, `model_mb` and `parameters` of a model.

    Args:
        model: model on `device`; DDP and compilation are unwrapped.
        x: a batch of inputs, on any device.
        device: device of the model.

    Raises:
        ObjectiveError: the model is sharded, or cannot be called with these inputs.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    model = getattr(model, "_orig_mod", model)
    if any(isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ObjectiveError("trial.measure needs an unsharded model, but this model is sharded over devices")
    call, x = bind_forward(model, x), to_device(x, device)
    with evaluation_mode(model, device, "measures"):
        latency = {"latency_ms": measure_latency_ms(lambda: call(model, x), device), **get_machine_load()}
        return {**latency, **measure_size(model)}


def measure_size(model: nn.Module) -> dict[str, float]:
    """Return `model_mb`, the size of parameters and buffers in 10^6 bytes, and `parameters`, the parameter count.

    Shared parameters count once, and frozen parameters count too. For a sharded model, both values cover all shards.
    """
    tensors = [*model.parameters(), *model.buffers()]
    return {
        "model_mb": sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 1e6,
        "parameters": float(sum(parameter.numel() for parameter in model.parameters())),
    }


def apply_memory_format(model: nn.Module, config: TrainConfig) -> None:
    """Apply the configured memory format and activation checkpointing to the model."""
    if config.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch declares no such overload
    if config.activation_checkpointing:
        for layer in list_layers(model):
            # Recomputation would update batch norm statistics twice.
            if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in layer.modules()):
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def unwrap_model(model: nn.Module) -> nn.Module:
    """Remove compilation, activation checkpointing and memory format from the model in place, and return it."""
    for module in model.modules():
        if _recomputes(module):  # other instance-level forwards belong to the model
            del module.forward
        module._compiled_call_impl = None
    return model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload, no-any-return]


@contextmanager
def unwrap_temporarily(model: nn.Module, config: TrainConfig) -> Iterator[None]:
    """Return a context in which the model is unwrapped as by `unwrap_model`.

    Enter inference mode inside this context, not before it, because the context changes the memory format of trainable
    weights.
    """
    modules = list(model.modules())
    compiled_calls = [module._compiled_call_impl for module in modules]
    recomputing = {module: vars(module).pop("forward") for module in modules if _recomputes(module)}
    for module in modules:
        module._compiled_call_impl = None
    if config.channels_last:
        model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # torch declares no such overload
    try:
        yield
    finally:
        for module, call in zip(modules, compiled_calls, strict=True):
            module._compiled_call_impl = call
        for module, forward in recomputing.items():
            module.forward = forward
        if config.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch declares no such overload


def _recomputes(module: nn.Module) -> bool:
    return getattr(vars(module).get("forward"), "func", None) is checkpoint


def get_peak_memory(device: torch.device) -> int | None:
    """Return the peak bytes of tensors on a CUDA device since `reset_peak_memory`; None on other devices."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak that `get_peak_memory` returns."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


_RESERVED_NAMES = {"lr", "grad_norm", "epoch_seconds", "peak_memory_bytes", "scaling_efficiency", "latency_load"}
_RESERVED_PREFIXES = ("train_", "val_", "samples_per_second")


@dataclass
class ModelMeasurer:
    """Measurement of the model metrics that the study requires, and of the metrics of `Objective.model_metrics`.

    Constant metrics are measured once, after the first epoch, and stored in checkpoints, so a resumed trial has the
    same values. Only required metrics are measured.

    Attributes:
        objective: objective whose `reported` lists the required metrics.
        config: configuration of the run.
        call: function that calls the model.
        val: the validation split; latency is measured on its first samples.
        names: required metrics in `MODEL_METRICS`; set by `sanity_check`.
        constant_metrics: constant metrics that are already measured.
        peak_bytes: peak of a device's memory in all attempts at the trial.
    """

    objective: Objective
    config: TrainConfig
    call: ForwardCall
    val: Dataset
    device: torch.device
    ranks: Ranks
    strategy: Strategy
    names: tuple[str, ...] = ()
    constant_metrics: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0

    def sanity_check(self, model: nn.Module, scores: Mapping[str, float]) -> None:
        """Check before training that all required metrics can be measured.

        Raises:
            MetricError: a required metric does not exist.
            ObjectiveError: a metric cannot be measured, or a value of the objective's `model_metrics` is not a number.
        """
        owner, required = type(self.objective).__name__, self.objective.reported
        known = {*scores, *self._measure_objective(model, scores), *MODEL_METRICS}
        for name in required:
            if name not in known:
                raise MetricError(name, f"is not a metric of {owner}; {suggest_names(name, sorted(known))}")
        self.names = tuple(name for name in required if name in MODEL_METRICS and name not in scores)
        if "latency_ms" in self.names:
            self._try_forward(model)

    def require_device(self) -> None:
        """Reject `peak_memory_mb` on a CPU.

        Raises:
            ObjectiveError: the device is a CPU, where the memory of the process includes other trials and libraries.
        """
        if "peak_memory_mb" in self.names and get_peak_memory(self.device) is None:
            raise ObjectiveError(
                f"peak_memory_mb is not available on {self.device}, because the memory of a trial cannot be separated "
                "from that of the process; use a CUDA device, or the metric model_mb or parameters"
            )

    def after_epoch(self, model: nn.Module, scores: Mapping[str, float]) -> dict[str, float]:
        """Return all metrics of the evaluated model by name. All ranks must call it together, and get the same values.

        Raises:
            ObjectiveError: a value of the objective's `model_metrics` is not a number, or a name is reserved.
        """
        found = {}
        if "peak_memory_mb" in self.names:  # read first, because the memory of other measurements would count
            self.peak_bytes = max(self.peak_bytes, *self.ranks.all_gather_object(get_peak_memory(self.device) or 0))
            found["peak_memory_mb"] = self.peak_bytes / 1e6
        missing = {*self.names} - {*self.constant_metrics, "peak_memory_mb"}
        if missing & {"model_mb", "parameters"}:
            self.constant_metrics.update({key: size for key, size in measure_size(model).items() if key in missing})
        if "latency_ms" in missing:
            self.constant_metrics.update(self.ranks.run_on_rank_zero(lambda: self._measure_latency(model)))
        return {**self.constant_metrics, **found, **self._measure_objective(model, scores)}

    def state_dict(self) -> dict[str, Any]:
        """Return the metrics measured so far as plain values; empty if the study requires no model metrics."""
        if not self.names:
            return {}
        held = get_peak_memory(self.device) if "peak_memory_mb" in self.names else None  # with unfinished epochs
        return {"known": dict(self.constant_metrics), "peak": max(self.peak_bytes, held or 0)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.constant_metrics, self.peak_bytes = dict(state.get("known", {})), state.get("peak", 0)

    def _measure_latency(self, model: nn.Module) -> dict[str, float]:
        with unwrap_temporarily(model, self.config), evaluation_mode(model, self.device, "measures"):
            x = self._make_inputs()
            return {"latency_ms": measure_latency_ms(lambda: self.call(model, x), self.device), **get_machine_load()}

    def _make_inputs(self) -> Any:
        return to_device(self.val.inputs(torch.arange(self.objective.latency_batch) % len(self.val)), self.device)

    def _try_forward(self, model: nn.Module) -> None:
        owner, size = type(self.objective).__name__, self.objective.latency_batch
        if not isinstance(size, int) or size < 1:
            raise ObjectiveError(f"{owner}.latency_batch must be an integer of at least 1, not {size!r}")
        if self.strategy.name == "fsdp":
            raise ObjectiveError(
                "latency_ms is not available with strategy 'fsdp', which shards the model over devices; use "
                "strategy='ddp', or the metric model_mb or parameters"
            )
        what = f"{owner}.model, called with {size} sample{'s' * (size > 1)} to measure latency_ms"
        with evaluation_mode(model, self.device, "measures"), wrap_user_errors(what):
            self.call(model, self._make_inputs())

    def _measure_objective(self, model: nn.Module, scores: Mapping[str, float]) -> dict[str, float]:
        """Return the result of the objective's `model_metrics` on rank 0."""
        if not overrides(self.objective, "model_metrics"):
            return {}
        owner = f"{type(self.objective).__name__}.model_metrics"
        explained = self.strategy.explain_sharding_errors()
        with evaluation_mode(model, self.device, "measures"), explained, wrap_user_errors(owner):
            with reject_changes(model, owner):
                found = self.objective.model_metrics(model, self.config)
            return self.ranks.broadcast_object(_to_floats(found, owner, {*scores, *MODEL_METRICS, *_RESERVED_NAMES}))


def _to_floats(found: Any, owner: str, taken: set[str]) -> dict[str, float]:
    """Convert the result of `Objective.model_metrics` to floats.

    Raises:
        ObjectiveError: the result is not a dictionary of numbers, or a name is reserved.
    """
    if not isinstance(found, Mapping):
        raise ObjectiveError(f"{owner} must return a dict such as {{'size_mb': 1.5}}, not {type(found).__name__}")
    for name, value in found.items():
        if not is_metric_name(name) or name in taken or name.startswith(_RESERVED_PREFIXES):
            raise ObjectiveError(f"{owner}: {name!r} is a reserved or invalid metric name; choose another name")
        if not isinstance(value, Real):
            raise ObjectiveError(f"{owner}: {name!r} must be a float, not {type(value).__name__}; return float(...)")
    return {name: float(value) for name, value in found.items()}
