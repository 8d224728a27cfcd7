"""A folder of files as a part of a trial's state: what other libraries save on all ranks together."""

from __future__ import annotations

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
    return {
        name: torch.from_numpy(np.memmap(folder / name, np.uint8, mode="c") if size else np.empty(0, np.uint8))
        for name, size in listed(folder).items()
    }


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


def place(run_dir: Path | None) -> Path:
    """Where a trial's checkpoint folder is to be: within its run's directory, where that has one."""
    if run_dir is not None:
        return run_dir.resolve() / "checkpoint"
    return Path(tempfile.gettempdir()) / f"hpsearch-{uuid.uuid4().hex}"
