"""Environment of a run: versions, device, command and source, for reproducibility."""

from __future__ import annotations

import hashlib
import platform
import re
import subprocess
import sys
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

# A resume is bit-exact only if none of these differs.
EXACT_KEYS = ("torch", "numpy", "pytorch-optimizer", "device", "device_name", "world", "threads", "machine", "compiled")
_DEFAULTS = {"world": 1}  # values for checkpoints without the entry

_MAX_DIFF_LENGTH = 1_000_000  # characters


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
        "command": _redact_passwords(" ".join(sys.argv)),
        "source_sha256": hashlib.sha256(source.read_bytes()).hexdigest() if source else None,
        **_git(source.parent if source else Path.cwd()),
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


@lru_cache
def _git(folder: Path) -> dict[str, Any]:
    """Return the commit of the source, and whether tracked files differ from it."""
    if not (sha := _run_git(folder, "rev-parse", "HEAD")):
        return {}
    return {"git_sha": sha, "git_dirty": bool(_run_git(folder, "status", "--porcelain", "--untracked-files=no"))}


@lru_cache
def read_git_diff(folder: Path) -> str:
    """Return the output of `git diff` for the repository of `folder`; empty if there is no git or repository."""
    diff = _run_git(folder, "diff", "--no-ext-diff", "HEAD")
    if len(diff) > _MAX_DIFF_LENGTH:
        diff = f"{diff[:_MAX_DIFF_LENGTH]}\n[truncated: {len(diff)} characters in total]"
    return _redact_passwords(diff) + "\n" if diff else ""


def _run_git(folder: Path, *arguments: str) -> str:
    """Run git in a folder and return its output, which is empty if git is missing or fails."""
    command = ("git", "--no-optional-locks", "-C", str(folder), *arguments)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _redact_passwords(command: str) -> str:
    """Return a command without the passwords of its URLs."""
    return re.sub(r"://([^:/@\s]*):[^@\s]*@", r"://\1:***@", command)
