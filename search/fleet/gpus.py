"""The GPUs of this machine, and how workers divide them."""

from __future__ import annotations

import os

from hpsearch.search.errors import SearchError


def visible_gpus() -> list[str]:
    """Return the CUDA devices this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    import torch

    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [part.strip() for part in given.split(",") if part.strip()]
    return [str(i) for i in range(torch.cuda.device_count())]


def gpus_of(index: int, gpus: list[str], each: int) -> list[str]:
    """Return the GPUs of the worker at `index`; where workers are more than sets of `each`, some share one."""
    sets = max(1, len(gpus) // each)
    first = index % sets * each
    return gpus[first : first + each]


def workers_on(gpus: list[str], *, sharing: int, each: int) -> int:
    """Return how many workers there are where so many share a set of `each` GPUs.

    Raises:
        SearchError: there is no such set.
    """
    if len(gpus) < each:
        raise SearchError(
            f"--workers-per-gpu {sharing}: there are {len(gpus)} GPUs here, and a trial needs {each}: use --workers"
        )
    return sharing * (len(gpus) // each)
