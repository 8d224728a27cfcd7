"""A folder of files as a part of a trial's state: what other libraries save on all ranks together."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hpsearch.objectives.errors import ObjectiveError


def listed(folder: Path) -> dict[str, int]:
    """The files of a folder with their sizes in bytes."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def packed(folder: Path) -> dict[str, Tensor]:
    """The files of a folder, as bytes by name; they stay on the disk until they are written elsewhere."""
    return {name: _mapped(folder / name, size) for name, size in listed(folder).items()}


def _mapped(path: Path, size: int) -> Tensor:
    if not size:  # nothing cannot be mapped
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.memmap(path, np.uint8, mode="c"))


def unpack(files: Mapping[str, Tensor], folder: Path) -> None:
    """Writes what `packed` gave into a folder.

    Raises:
        ObjectiveError: a name leads out of the folder.
    """
    for name, content in files.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ObjectiveError(f"the state names a file outside of its folder: {name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        content.numpy().tofile(path)


def remove(folder: Path) -> None:
    """Removes a folder, if it is there."""
    shutil.rmtree(folder, ignore_errors=True)


def place(run_dir: Path | None) -> Path:
    """Where a trial's checkpoint folder is to be: within its run's directory, where that has one."""
    if run_dir is not None:
        return run_dir.resolve() / "checkpoint"
    return Path(tempfile.gettempdir()) / f"hpsearch-{uuid.uuid4().hex}"
