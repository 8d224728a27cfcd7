"""The registrable model of a trial that cannot be exported: its checkpoint, and where its code is."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow import MlflowClient

WEIGHTS_ONLY = "hpsearch.weights_only"  # the tag of such a model; its value says why
CHECKPOINT = "checkpoint.pt"


def keep_weights(checkpoint: Path, folder: Path, *, objective: str, why: str) -> None:
    """Write a model as MLflow keeps it that only the objective's own code can load.

    Args:
        checkpoint: the trial's `best.pt`: plain values and tensors, for ``torch.load(..., weights_only=True)``.
        folder: where to; replaced when it exists.
        objective: reference of the objective whose code makes the model.
        why: it cannot be exported.

    Raises:
        OSError: there is no room.
    """
    from mlflow.models import Model

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copyfile(checkpoint, folder / CHECKPOINT)
    model = Model()
    model.add_flavor("hpsearch", checkpoint=CHECKPOINT, objective=objective, not_exported=why)
    model.save(str(folder / "MLmodel"))


def why_weights_only(client: MlflowClient, model_id: str | None) -> str:
    """Return why a model is but a checkpoint; nothing where it can be loaded without its code."""
    return "" if model_id is None else str(client.get_logged_model(model_id).tags.get(WEIGHTS_ONLY, ""))


def fetch_checkpoint(model_id: str, folder: Path, *, tracking_uri: str) -> Path:
    """Bring the checkpoint of such a model into a folder."""
    from mlflow.artifacts import download_artifacts

    found = download_artifacts(artifact_uri=f"models:/{model_id}", dst_path=str(folder), tracking_uri=tracking_uri)
    return Path(found) / CHECKPOINT
