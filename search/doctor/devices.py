"""What there is to compute on: processors, and GPUs."""

from __future__ import annotations

import os
import shutil
import subprocess

from hpsearch.search.console import counted
from hpsearch.search.doctor.check import Check, Found, ok, warning
from hpsearch.search.fleet.cores import cores

_PATIENCE = 20  # seconds for nvidia-smi, which can hang with its driver


def device_checks() -> list[Check]:
    """Return the checks of the processors and of the GPUs."""
    return [Check("cpu", _processors), Check("gpu", _gpus)]


def _processors() -> Found:
    allowed, there = cores(), os.cpu_count() or 1
    return ok(counted(allowed, "core") + (f" allowed of {there}" if allowed < there else ""))


def _gpus() -> Found:
    import torch
    from rich.filesize import decimal

    if torch.cuda.is_available():
        devices = []
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            devices.append(f"cuda:{index} {name}, {decimal(free)} of {decimal(total)} free")
        return ok("; ".join(devices))
    names = _seen_by_the_driver()
    return unseen(names) if names else ok("none: trials run on the cores")


def unseen(names: list[str]) -> Found:
    """Return the warning of GPUs that the driver has and torch has not, with what is probably the reason."""
    import torch

    kinds = ", ".join(sorted(set(names)))
    found = f"nvidia-smi sees {counted(len(names), 'GPU')} ({kinds}), torch {torch.__version__} none"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return warning(f"{found}; CUDA_VISIBLE_DEVICES is {hidden!r}", "unset it to use them")
    if torch.version.cuda is None:
        return warning(
            found, "install a torch with CUDA: remove .venv, set HPSEARCH_TORCH_BACKEND=auto, run ./hpsearch"
        )
    return warning(found, f"install a driver that CUDA {torch.version.cuda} can use")


def _seen_by_the_driver() -> list[str]:
    """The names of the GPUs that nvidia-smi lists; none where it is not there or does not work."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    ask = [program, "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=_PATIENCE, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
