"""Compile a model with torch.compile, on all ranks or on none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hpsearch.objectives.private_folders import use_private_compiler_cache
from hpsearch.objectives.training.optimizers.optimizer import list_layers
from hpsearch.objectives.training.ranks import Ranks


def compile_model(
    model: nn.Module, eval_model: nn.Module, try_step: Callable[[], None], ranks: Ranks, *, by_layer: bool
) -> str | None:
    """Compile the model and its weight average; if compilation fails on a rank, leave both uncompiled on all ranks.

    Args:
        model: model to compile in place; the names of its parameters do not change.
        eval_model: the weight average, or `model` itself if there is no average.
        try_step: function that runs a forward and a backward pass.
        ranks: ranks that train together.
        by_layer: whether to compile each layer separately, as FSDP needs.

    Returns:
        The reason why compilation failed; None on success.
    """
    use_private_compiler_cache()
    both = [model] if eval_model is model else [model, eval_model]
    if by_layer:
        return _compile_layers([layer for each in both for layer in list_layers(each)], try_step, ranks)
    for module in both:
        _compile_in_place(module)
    error = None
    try:
        with _ignore_working_folder():
            try_step()
    except Exception as raised:  # compilers raise any type; the model works without compilation
        error = raised
    reason = _find_reason(error, ranks)
    if reason is not None:
        for module in both:
            module._compiled_call_impl = None
    return reason


def _compile_layers(layers: Sequence[nn.Module], try_step: Callable[[], None], ranks: Ranks) -> str | None:
    """Compile `forward` of each layer, without the hooks in which FSDP gathers and releases the layer's weights."""
    compiled = [_CompiledForward(layer) for layer in layers]
    for layer, forward in zip(layers, compiled, strict=True):
        layer.forward = forward
    with _ignore_working_folder():
        try_step()
    reason = _find_reason(next((forward.error for forward in compiled if forward.error is not None), None), ranks)
    for layer, forward in zip(layers, compiled, strict=True):
        layer.forward = forward.original if reason is not None else forward.compiled
    return reason


class _CompiledForward:
    """The compiled `forward` of a layer, and the original one after an error of the compiler.

    In the test step, a rank must continue after an error, because the other ranks wait for it in the next layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.original = original = layer.forward
        self.error: Exception | None = None

        def call(*args: Any, **kwargs: Any) -> Any:  # for layers of torch, as in `_compile_in_place`
            return original(*args, **kwargs)

        self.compiled = torch.compile(call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.error is None:
            try:
                return self.compiled(*args, **kwargs)
            except Exception as error:  # compilers raise any type; if it is the layer's, the next call raises it again
                self.error = error
        return self.original(*args, **kwargs)


def _find_reason(error: Exception | None, ranks: Ranks) -> str | None:
    """Return the error of the first rank that has one, as one line; None if no rank has one."""
    reason = None
    if error is not None:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {' '.join(lines[:2]) or 'no detail'}"  # line 1 may only name the backend
    return next((each for each in ranks.all_gather_object(reason) if each is not None), None)


def _compile_in_place(module: nn.Module) -> None:
    """Compile calls of a module, also if its class belongs to torch.

    `nn.Module.compile` has no effect on such a module, for example an `nn.Sequential`, because the compiler skips
    frames of torch that no other compiled frame calls.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch declares no types

    module._compiled_call_impl = torch.compile(call)


@contextmanager
def _ignore_working_folder() -> Iterator[None]:
    """Let interpreters that torch's compiler starts import no modules of the working folder."""
    former = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if former is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = former
