"""Whether the artifacts of runs can be written: tried where they are kept, without a run."""

from __future__ import annotations

import tempfile
import uuid
from pathlib import Path

from hpsearch.storage.mlflow.client import EXPERIMENT, Tracking

_DEFAULT = "0"  # the experiment that every server has


def write_probe(tracking: Tracking) -> str:
    """Write a small artifact beside those of the runs, in a folder of its own; return the address of the folder.

    The experiment is not made for it: where there is none yet, that of MLflow itself has the same kind of place.

    Raises:
        StorageError: somebody deleted the experiment.
        Exception: whatever the client of the server, or of the store of artifacts, raises.
    """
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    there = tracking.client.get_experiment_by_name(EXPERIMENT) is not None
    experiment = tracking.client.get_experiment(tracking.experiment_id if there else _DEFAULT)
    place = f"{str(experiment.artifact_location).rstrip('/')}/hpsearch-probe-{uuid.uuid4().hex}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "probe.txt"
        file.write_text("hpsearch")
        get_artifact_repository(place, tracking_uri=tracking.uri).log_artifact(str(file))
    return place


def remove_probe(tracking: Tracking, place: str) -> None:
    """Remove what `write_probe` wrote."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    get_artifact_repository(place, tracking_uri=tracking.uri).delete_artifacts()
