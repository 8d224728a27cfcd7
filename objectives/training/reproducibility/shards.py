"""A checkpoint in parts: a file that says which, and a folder of them that several processes wrote.

The file is a checkpoint as any other (:mod:`objectives.training.reproducibility.checkpoint`). In its state tensors that
are in the parts have no values (device "meta"), and `state["shards"]` is the manifest: the folder's name, and the size
and SHA-256 of each file in it.
"""

from __future__ import annotations

import hashlib
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch

from hpsearch.objectives.training.reproducibility.checkpoint import CheckpointError

FOLDER = "shards"  # of a run directory


def entry(path: Path) -> dict[str, Any]:
    """What a manifest says of a file."""
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def require_written(state: dict[str, Any]) -> None:
    """Refuses a state whose parts were not written.

    Raises:
        OSError: the disk is full, or the like.
    """
    if (reason := state.get("shards", {}).get("failed")) is not None:
        raise OSError(reason)


def located(state: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """A state that was read from a run directory, with the path of the folder that its parts are in."""
    if "shards" not in state:
        return state
    folder = run_dir / FOLDER / Path(state["shards"]["folder"]).name
    return {**state, "shards": {**state["shards"], "folder": str(folder.resolve())}}


def verified(state: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """The same, once all parts are found to be what the manifest says.

    Raises:
        CheckpointError: one is gone, torn or changed.
    """
    state = located(state, run_dir)
    for name, expected in state.get("shards", {}).get("files", {}).items():
        path = Path(state["shards"]["folder"], name)
        try:
            if entry(path) == expected:
                continue
        except FileNotFoundError:
            raise CheckpointError(f"{path} is gone: its checkpoint is of no use") from None
        raise CheckpointError(f"{path} is torn or was changed: its checksum does not fit")
    return state


def remove_unnamed(run_dir: Path) -> None:
    """Removes the parts that no checkpoint in a run directory names."""
    folder = run_dir / FOLDER
    if not folder.is_dir():
        return
    named = {_named(path) for path in run_dir.glob("*.pt")}
    left = [part for part in folder.iterdir() if part.name in named]
    for part in folder.iterdir() if left else [folder]:
        if part not in left:
            shutil.rmtree(part, ignore_errors=True)


def _named(path: Path) -> str | None:
    """The folder of parts that a checkpoint names; its tensors are not read."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return str(state["shards"]["folder"]) if "shards" in state else None
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError):  # torn: of no use, nor are its parts
        return None
