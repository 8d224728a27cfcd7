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

from hpsearch.objectives.errors import MetricError, ObjectiveError, nearest, users_code
from hpsearch.objectives.measured import MEASURED
from hpsearch.objectives.objective import Objective, overrides
from hpsearch.objectives.training.config import TrainConfig
from hpsearch.objectives.training.data.dataset import Dataset
from hpsearch.objectives.training.data.tree import Tree, moved
from hpsearch.objectives.training.evaluation.evaluate import evaluating
from hpsearch.objectives.training.evaluation.step import Call, call_of
from hpsearch.objectives.training.optimizers.optimizer import layers
from hpsearch.objectives.training.ranks import Ranks
from hpsearch.objectives.training.strategies.base import Strategy

_WARM_UP, _TIMED, _FEWEST = 5, 30, 5  # calls
_SHORTEST, _LONGEST = 0.2, 0.5  # seconds of timing, unless so few calls take longer


def latency_ms(forward: Callable[[], object], device: torch.device) -> float:
    """The median time of a call in ms, after a warm-up; every call is waited for.

    It is called 5 times to warm up, then timed 30 times and for 0.2 s at least; what takes longer is timed until 0.5 s
    are over, 5 times at least. CPU threads are those that the trial has. Torch's own timer (torch.utils.benchmark)
    times blocks of calls, which overlap on an accelerator: that is throughput.
    """
    begun = time.perf_counter()
    for _ in range(_WARM_UP):
        _timed(forward, device)
        if time.perf_counter() - begun > _LONGEST:
            break
    seconds: list[float] = []
    begun, collects = time.perf_counter(), gc.isenabled()
    gc.disable()  # as timeit does: a collection is none of the model's
    try:
        while _goes_on(len(seconds), time.perf_counter() - begun):
            seconds.append(_timed(forward, device))
    finally:
        if collects:
            gc.enable()
    return statistics.median(seconds) * 1000


def _goes_on(calls: int, elapsed: float) -> bool:
    return calls < _FEWEST or (elapsed < _LONGEST and (calls < _TIMED or elapsed < _SHORTEST))


def _timed(forward: Callable[[], object], device: torch.device) -> float:
    synchronise(device)
    begun = time.perf_counter()
    forward()
    synchronise(device)
    return time.perf_counter() - begun


def synchronise(device: torch.device) -> None:
    """Waits for what an accelerator has yet to do."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def machine_load() -> dict[str, float]:
    """`latency_load`: the machine's load average of the last minute, over its cores; nothing where it keeps none.

    Above 1 programs wait for each other, and times are longer than they need be.
    """
    if not hasattr(os, "getloadavg"):
        return {}
    return {"latency_load": os.getloadavg()[0] / (os.cpu_count() or 1)}


def plain_measures(model: nn.Module, x: Tree, device: torch.device) -> dict[str, float]:
    """`latency_ms` of a batch of inputs beside `latency_load`, `model_mb` and `parameters`, of a model without a run.

    Args:
        model: on `device`; what wraps it to train on ranks, or compiles it, is looked through.
        x: inputs as the model takes them, on any device.
        device: of the model.

    Raises:
        ObjectiveError: the model is spread over devices, or does not take such inputs.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    model = getattr(model, "_orig_mod", model)
    if any(isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ObjectiveError("trial.measure takes a whole model, and of this one each device has a part")
    call, x = call_of(model, x), moved(x, device)
    with evaluating(model, device, "measures"):
        return {"latency_ms": latency_ms(lambda: call(model, x), device), **machine_load(), **sizes(model)}


def sizes(model: nn.Module) -> dict[str, float]:
    """`model_mb` and `parameters` of the whole model: what several modules share counts once.

    The first is of parameters and buffers, in 10^6 bytes as sizes of files are; the second of parameters alone, frozen
    ones among them. Of a sharded model both are of all its parts.
    """
    tensors = [*model.parameters(), *model.buffers()]
    return {
        "model_mb": sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 1e6,
        "parameters": float(sum(parameter.numel() for parameter in model.parameters())),
    }


def layout(model: nn.Module, config: TrainConfig) -> None:
    """Lays out the model's memory, and its layers' activations, as configured."""
    if config.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch declares no such overload
    if config.activation_checkpointing:
        for layer in layers(model):
            # Batch norm would count a batch twice, once more when its activations are computed again.
            if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in layer.modules()):
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def plain(model: nn.Module) -> nn.Module:
    """The model without what `layout` and `compiled` put on it, as it is served."""
    for module in model.modules():
        if _recomputes(module):  # another forward of its own belongs to the model
            del module.forward
        module._compiled_call_impl = None
    return model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload, no-any-return]


@contextmanager
def as_served(model: nn.Module, config: TrainConfig) -> Iterator[None]:
    """A region in which a model is without what `layout` and `compiled` put on it, as `plain` leaves it.

    Inference mode may begin within it, not before: the memory of weights that train is laid out in it.
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


def compiled(model: nn.Module, judged: nn.Module, trial: Callable[[], None]) -> str | None:
    """Compiles the model, and the average that is judged in its place, where that works.

    Args:
        model: compiled in place: the names of its parameters stay.
        judged: the model or its average.
        trial: runs a forward and a backward pass.

    Returns:
        Why the model is not compiled; None when it is.
    """
    both = [model] if judged is model else [model, judged]
    for module in both:
        module.compile()
    try:
        trial()
    except Exception as error:  # whatever compilers raise: the model ran a moment ago without them
        for module in both:
            module._compiled_call_impl = None
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {' '.join(lines[:2]) or 'no detail'}"  # the first may only name the backend
    return None


def peak_memory(device: torch.device) -> int | None:
    """Most bytes that tensors held on a CUDA device at once since `reset_peak_memory`; None on others."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def reset_peak_memory(device: torch.device) -> None:
    """Starts to measure `peak_memory` anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


_TAKEN = {"lr", "grad_norm", "epoch_seconds", "peak_memory_bytes", "scaling_efficiency", "latency_load"}
_BEGINNINGS = ("train_", "val_", "samples_per_second")


@dataclass
class Measuring:
    """What a study asks for that no validation gives, and the objective's own measures.

    What is the same in every epoch is measured once, after the first, and kept in checkpoints: a trial that is resumed
    has the same numbers. Nothing is measured that nobody asks for.

    Attributes:
        objective: whose `reported` says what is asked for.
        config: of the run.
        call: how its model is called.
        val: the validation split; its first samples are what latency is measured on.
        names: what is measured, of `MEASURED`; known after `rehearse`.
        known: what was measured once.
        peak: most bytes of a device that any attempt at the trial held, so far.
    """

    objective: Objective
    config: TrainConfig
    call: Call
    val: Dataset
    device: torch.device
    ranks: Ranks
    strategy: Strategy
    names: tuple[str, ...] = ()
    known: dict[str, float] = field(default_factory=dict)
    peak: int = 0

    def rehearse(self, model: nn.Module, scores: Mapping[str, float]) -> None:
        """Tries, before training, all that is asked for.

        Raises:
            ObjectiveError: something that is asked for is reported by nobody, or cannot be measured; or the
                objective's measures are no numbers.
        """
        who, asked = type(self.objective).__name__, self.objective.reported
        own = self._own(model, scores)
        known = {*scores, *own, *MEASURED}
        for name in asked:
            if name not in known:
                raise MetricError(name, f"is none that {who} gives, nor measured: {nearest(name, sorted(known))}")
        self.names = tuple(name for name in asked if name in MEASURED and name not in scores)
        if "latency_ms" in self.names:
            self._try_forward(model)

    def require_device(self) -> None:
        """Refuses to measure memory where it is not the trial's own.

        Raises:
            ObjectiveError: on a CPU the process's memory is that of all its trials, their data and libraries.
        """
        if "peak_memory_mb" in self.names and peak_memory(self.device) is None:
            raise ObjectiveError(
                f"peak_memory_mb is measured on CUDA devices, and this trial runs on {self.device}: its memory there "
                "cannot be told from that of the process and of earlier trials; model_mb and parameters can be measured"
            )

    def after_epoch(self, model: nn.Module, scores: Mapping[str, float]) -> dict[str, float]:
        """All that is measured of the model that was judged, by name; the same on all ranks, who call it together.

        Raises:
            ObjectiveError: the objective's measures are no numbers, or have names that are taken.
        """
        found = {}
        if "peak_memory_mb" in self.names:  # before anything else is measured, which would count
            self.peak = max(self.peak, *self.ranks.each(peak_memory(self.device) or 0))
            found["peak_memory_mb"] = self.peak / 1e6
        lacking = {*self.names} - {*self.known, "peak_memory_mb"}
        if lacking & {"model_mb", "parameters"}:
            self.known.update({name: value for name, value in sizes(model).items() if name in lacking})
        if "latency_ms" in lacking:
            self.known.update(self.ranks.led(lambda: self._latency(model)))
        return {**self.known, **found, **self._own(model, scores)}

    def state_dict(self) -> dict[str, Any]:
        """What was measured so far, as plain values; empty where nothing is kept."""
        if not self.names:
            return {}
        held = peak_memory(self.device) if "peak_memory_mb" in self.names else None  # of an epoch that is left, too
        return {"known": dict(self.known), "peak": max(self.peak, held or 0)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        self.known, self.peak = dict(state.get("known", {})), state.get("peak", 0)

    def _latency(self, model: nn.Module) -> dict[str, float]:
        with as_served(model, self.config), evaluating(model, self.device, "measures"):
            x = self._inputs()
            return {"latency_ms": latency_ms(lambda: self.call(model, x), self.device), **machine_load()}

    def _inputs(self) -> Any:
        rows = torch.arange(self.objective.latency_batch) % len(self.val)
        return moved(self.val.inputs(rows), self.device)

    def _try_forward(self, model: nn.Module) -> None:
        who, size = type(self.objective).__name__, self.objective.latency_batch
        if not isinstance(size, int) or size < 1:
            raise ObjectiveError(f"{who}.latency_batch must be a whole number of at least 1, not {size!r}")
        if self.strategy.name == "fsdp":
            raise ObjectiveError(
                "latency_ms cannot be measured with strategy 'fsdp', where each device has a part of the model: set "
                "strategy='ddp', or judge by model_mb or parameters"
            )
        what = f"{who}.model, called with {size} sample{'s' * (size > 1)} to measure latency_ms"
        with evaluating(model, self.device, "measures"), users_code(what):
            self.call(model, self._inputs())

    def _own(self, model: nn.Module, scores: Mapping[str, float]) -> dict[str, float]:
        """The objective's own measures, rank 0's."""
        if not overrides(self.objective, "measures"):
            return {}
        who = f"{type(self.objective).__name__}.measures"
        with evaluating(model, self.device, "measures"), self.strategy.explained(), users_code(who):
            found = self.objective.measures(model, self.config)
            return self.ranks.told(_floats(found, who, {*scores, *MEASURED, *_TAKEN}))


def _floats(found: Any, who: str, taken: set[str]) -> dict[str, float]:
    """Measures as floats.

    Raises:
        ObjectiveError: they are no dictionary of numbers, or a name is taken.
    """
    if not isinstance(found, Mapping):
        raise ObjectiveError(f"{who} must return a dictionary of numbers by name, not {type(found).__name__}")
    for name, value in found.items():
        if not isinstance(name, str) or not name or name in taken or name.startswith(_BEGINNINGS):
            raise ObjectiveError(f"{who}: the name {name!r} is taken, or none: choose another")
        if not isinstance(value, Real):
            raise ObjectiveError(f"{who}: {name} must be a float, not a {type(value).__name__}: give float(...)")
    return {name: float(value) for name, value in found.items()}
