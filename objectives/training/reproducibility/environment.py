"""Environment of a run: versions, device, command and source, for reproducibility."""

from __future__ import annotations

import hashlib
import platform
import sys
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from hpsearch.objectives.training.reproducibility.changes import compare_with_commit, read_commit
from hpsearch.redaction import redact

# A resume is bit-exact only if none of these differs.
EXACT_KEYS = ("torch", "numpy", "pytorch-optimizer", "device", "device_name", "world", "threads", "machine", "compiled")
_DEFAULTS = {"world": 1}  # values for checkpoints without the entry


def describe_environment(device: torch.device, source: Path | None, world: int = 1) -> dict[str, Any]:
    """Return plain values that describe the process, the device, the number of ranks, and the objective's source."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **{name: _version(name) for name in ("numpy", "scikit-learn", "torchmetrics", "pytorch-optimizer")},
        "machine": platform.machine(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "world": world,
        "threads": torch.get_num_threads(),
        "compiled": False,  # set after a successful compilation
        "command": redact(" ".join(sys.argv)),
        "source_sha256": hashlib.sha256(source.read_bytes()).hexdigest() if source else None,
        **_describe_commit(source),
    }


def describe_differences(then: dict[str, Any], now: dict[str, Any]) -> str:
    """Return the differences of environments that make a resume inexact: `torch 2.12.0 -> 2.13.0, threads 4 -> 2`."""
    old = {**_DEFAULTS, **then}
    return ", ".join(f"{key} {old.get(key)} -> {now.get(key)}" for key in EXACT_KEYS if old.get(key) != now.get(key))


@lru_cache
def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _describe_commit(source: Path | None) -> dict[str, Any]:
    """Return the commit of the source, or of the working folder, and whether the source and its imports differ from it.

    The difference is None if it is unknown.
    """
    if not (sha := read_commit(source.resolve().parent if source else Path.cwd())):
        return {}
    changed = compare_with_commit(source, len(sys.modules)) if source else None
    return {"git_sha": sha, "git_dirty": None if changed is None else bool(changed)}
