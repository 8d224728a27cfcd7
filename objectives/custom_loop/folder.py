"""Conversion of checkpoint folders, which other libraries write from all ranks, to and from a trial's state."""

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


def list_files(folder: Path) -> dict[str, int]:
    """Return the sizes in bytes of a folder's files, by relative path."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def pack_folder(folder: Path) -> dict[str, Tensor]:
    """Return the contents of a folder's files by relative path, as memory-mapped tensors of bytes."""
    return {
        name: torch.from_numpy(np.memmap(folder / name, np.uint8, mode="c") if size else np.empty(0, np.uint8))
        for name, size in list_files(folder).items()
    }


def unpack_folder(files: Mapping[str, Tensor], folder: Path) -> None:
    """Write the result of `pack_folder` into a folder.

    Raises:
        ObjectiveError: a name is a path outside the folder.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it may be in the temporary folder
    for name, content in files.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ObjectiveError(f"the checkpoint contains the path {name!r}, which is outside the checkpoint folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        content.numpy().tofile(path)


def empty_folder(folder: Path) -> None:
    """Delete the contents of a folder, but not the folder, whose path the loop may have stored."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def choose_checkpoint_folder(run_dir: Path | None) -> Path:
    """Return the path of a trial's checkpoint folder: in `run_dir`, or in the temporary folder if `run_dir` is None."""
    if run_dir is not None:
        return run_dir.resolve() / "checkpoint"
    return Path(tempfile.gettempdir()) / f"hpsearch-{uuid.uuid4().hex}"
