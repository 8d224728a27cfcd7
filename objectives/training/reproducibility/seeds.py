"""Seeds, deterministic kernels, and restoration of the process's random state."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def derive_seed(*parts: int | str) -> int:
    """Return a seed below 2**32 that depends only on `parts`, which identify its purpose."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:4], "big")


def set_seed(*parts: int | str) -> None:
    """Seed Python, NumPy and torch on all devices by `parts`.

    Every epoch is seeded by (seed, epoch), so a resume at the start of an epoch is exact without a saved RNG state.
    """
    seed = seed_cpu_libraries(*parts)
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)  # `manual_seed` formats a stack for each kind of device: up to 1 ms


def seed_cpu_libraries(*parts: int | str) -> int:
    """Seed Python and NumPy by `parts`, and return the seed. The old states are not kept, which would be slow."""
    seed = derive_seed(*parts)
    random.seed(seed)
    np.random.seed(seed)
    return seed


@contextmanager
def seed_temporarily(*parts: int | str) -> Iterator[None]:
    """Return a context in which the CPU's random generators are seeded by `parts`; its end restores their states."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    torch.default_generator.manual_seed(seed_cpu_libraries(*parts))  # a process that loads data must not use the GPU
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)


@contextmanager
def seed_device_temporarily(device: torch.device, *parts: int | str) -> Iterator[None]:
    """Return a context like `seed_temporarily` that also seeds and restores the device's generator."""
    on_gpu = device.type == "cuda"
    with seed_temporarily(*parts), torch.random.fork_rng(devices=[device] if on_gpu else [], enabled=on_gpu):
        if on_gpu:
            torch.cuda.manual_seed(derive_seed(*parts))
        yield


def get_rng_state(device: torch.device) -> dict[str, Any]:
    """Return the states of the generators that training uses, as plain values and tensors."""
    kind, words, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(words, np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore the result of `get_rng_state`."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, key, *rest = state["numpy"]
    np.random.set_state((kind, key.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["device"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["device"], device)


@contextmanager
def make_reproducible(*, deterministic: bool, matmul_precision: str = "highest") -> Iterator[None]:
    """Return a context that sets determinism and matrix precision; its end restores them and all random generators."""
    deterministic_settings: Any = torch.utils.deterministic
    python, numpy = random.getstate(), np.random.get_state()
    uses_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's
    cpu, cuda = torch.get_rng_state(), torch.cuda.get_rng_state_all() if uses_cuda else None
    matmul = torch.get_float32_matmul_precision()
    switches = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        deterministic_settings.fill_uninitialized_memory,
    )
    if deterministic:
        enable_repeatable_cublas()
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        deterministic_settings.fill_uninitialized_memory = False  # filling memory is a debugging aid that costs time
    torch.set_float32_matmul_precision(matmul_precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.use_deterministic_algorithms(switches[0], warn_only=switches[1])
        torch.backends.cudnn.benchmark = switches[2]
        deterministic_settings.fill_uninitialized_memory = switches[3]
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


def enable_repeatable_cublas() -> None:
    """Make the sums of cuBLAS deterministic. Call it before CUDA starts, because cuBLAS reads the setting only then."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def keep_torch_defaults() -> Iterator[None]:
    """Restore torch's default type and device at the end, which code of the objective may change for later trials."""
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)


@contextmanager
def use_one_thread() -> Iterator[None]:
    """Let torch compute with one thread during this block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
