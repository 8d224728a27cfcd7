"""How fast a model is, and how large: what a number of `hpsearch.objectives.measured` is, and how it is measured."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.training.data.tree import Tree, moved
from hpsearch.objectives.training.evaluation.calling import call_of
from hpsearch.objectives.training.reproducibility.seeds import seeded_on

_WARM_UP, _TIMED, _FEWEST = 5, 30, 5  # calls
_SHORTEST, _LONGEST = 0.2, 0.5  # seconds of timing, unless so few calls take longer


def latency_ms(forward: Callable[[], object], device: torch.device) -> float:
    """The median time of a call in ms, after a warm-up; every call is waited for.

    It is called 5 times to warm up, then timed 30 times and for 0.2 s at least; what takes longer is timed until 0.5 s
    are over, 5 times at least. CPU threads are those that the trial has. Torch's own timer (torch.utils.benchmark)
    times blocks of calls, which overlap on an accelerator: that is throughput.

    Args:
        forward: what is timed.
        device: that it runs on.
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
    call, x, training = call_of(model, x), moved(x, device), model.training
    model.eval()
    try:
        with torch.inference_mode(), seeded_on(device, "measures"):
            return {"latency_ms": latency_ms(lambda: call(model, x), device), **machine_load(), **sizes(model)}
    finally:
        model.train(training)


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
