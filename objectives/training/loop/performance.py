"""What makes the same numbers come sooner or fit: memory layout, compilation, recomputed activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hpsearch.objectives.training.optimizers.layers import layers

if TYPE_CHECKING:
    from hpsearch.objectives.training.config import TrainConfig


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
        if "forward" in vars(module):
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
