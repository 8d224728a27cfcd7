"""A library of torch's CUDA build that would load a file of the working folder."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from contextlib import suppress
from pathlib import Path

from hpsearch.working_folder import use_root_folder

_PACKAGE, _FILE = "nvidia.cusparselt", "lib/libcusparseLt.so.0"


def load_cuda_library() -> None:
    """Load NVIDIA's cuSPARSELt with the root folder as the working folder. Call this before torch is imported.

    The library searches `libcuda.so.1` in the working folder, because its RUNPATH has an empty part. On a machine
    without NVIDIA's driver, a file of this name there would be loaded and run.
    """
    if sys.platform != "linux" or "torch" in sys.modules:
        return
    with suppress(ImportError, ValueError, OSError):
        spec = importlib.util.find_spec(_PACKAGE)
        folders = (spec.submodule_search_locations if spec else None) or []
        files = [path for folder in folders if (path := Path(folder, _FILE).absolute()).exists()]
        if not files:
            return
        with use_root_folder():
            ctypes.CDLL(str(files[0]))
