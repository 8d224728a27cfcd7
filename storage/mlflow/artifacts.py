"""Access to the artifacts of MLflow runs from the Optuna dashboard, without a second copy.

The dashboard lists the artifacts that a trial's system attributes name. It requests their content from an Optuna
artifact store, by an id of hexadecimal digits. The id encodes the run and the artifact path, so that
`MlflowArtifactStore` needs no lookup.
"""

from __future__ import annotations

import json
import mimetypes
import re
import tempfile
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO

from optuna.artifacts.exceptions import ArtifactNotFound

from hpsearch.storage.mlflow.client import EXPERIMENT_NAME, Tracking
from hpsearch.storage.mlflow.locations import check_location

if TYPE_CHECKING:
    from mlflow import MlflowClient

# The artifacts that users open. Only these are listed, because each one is a trial attribute that every worker reads.
DASHBOARD_ARTIFACTS = ("curves.png", "gradients.png", "report.md", "config.yaml", "metrics.jsonl")

ATTR_PREFIX = "artifacts:"  # of Optuna's system attributes
_ID = re.compile(r"(?P<run>[0-9a-f]{32})-(?P<path>(?:[0-9a-f]{2})+)")


def make_artifact_attrs(run_id: str, names: Iterable[str]) -> dict[str, str]:
    """Return the system attributes by which the dashboard lists artifacts, in the format of `optuna.artifacts`.

    Args:
        run_id: the id of the run with the artifacts.
        names: artifact paths; paths that are not in `DASHBOARD_ARTIFACTS` are ignored.
    """
    attrs = {}
    for name in (name for name in names if name in DASHBOARD_ARTIFACTS):
        artifact_id = make_artifact_id(run_id, name)
        mimetype, encoding = mimetypes.guess_type(name)
        # A browser displays text files, and offers to save files of unknown types.
        if mimetype is None or not mimetype.startswith("image/"):
            mimetype = "text/plain; charset=utf-8"
        metadata = {"artifact_id": artifact_id, "filename": name, "mimetype": mimetype, "encoding": encoding}
        attrs[ATTR_PREFIX + artifact_id] = json.dumps(metadata)
    return attrs


def make_artifact_id(run_id: str, path: str) -> str:
    """Return the id of a run's artifact, which has only hexadecimal digits and dashes, as the dashboard requires."""
    return f"{run_id}-{path.encode().hex()}"


def read_artifact(client: MlflowClient, run_id: str, path: str) -> BinaryIO:
    """Return an artifact of a run as an open temporary file, which is deleted when it is closed.

    Raises:
        MlflowException: the server is unavailable, or has no such artifact.
    """
    with tempfile.TemporaryDirectory(prefix="hpsearch-") as folder:
        return Path(client.download_artifacts(run_id, path, folder)).open("rb")


class MlflowArtifactStore:
    """A read-only artifact store for Optuna with the artifacts of MLflow runs.

    Args:
        get_client: a function that returns a client of the MLflow server.
    """

    def __init__(self, get_client: Callable[[], MlflowClient]) -> None:
        self._get_client = get_client

    def open_reader(self, artifact_id: str) -> BinaryIO:
        """Return the content of an artifact.

        Raises:
            ArtifactNotFound: MLflow does not have the artifact, or is unavailable.
        """
        if (match := _ID.fullmatch(artifact_id)) is None:
            raise ArtifactNotFound(f"no artifact {artifact_id!r}")
        try:
            path = bytes.fromhex(match["path"]).decode()
            if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or "\\" in path:
                raise ArtifactNotFound(f"no artifact {path!r}")
            return read_artifact(self._get_client(), match["run"], path)
        except ArtifactNotFound:
            raise
        except Exception as error:  # the server is unavailable, the artifact is deleted, or access is denied
            raise ArtifactNotFound(f"MLflow did not return {artifact_id}: {error}") from None

    def write(self, artifact_id: str, content_body: BinaryIO) -> None:  # noqa: ARG002 the interface is Optuna's
        """Raise PermissionError, because only workers log artifacts."""
        raise PermissionError("artifacts are read-only here; log them to the MLflow run")

    def remove(self, artifact_id: str) -> None:
        """Do nothing: MLflow keeps an artifact that the dashboard removes, for example together with a study."""


_DEFAULT_EXPERIMENT_ID = "0"  # every server has this experiment


def write_probe(tracking: Tracking) -> str:
    """Write a small artifact to a new folder, as that of a run, and return the location of the folder.

    The experiment is not created. If it does not exist, the artifact is written next to those of MLflow's default
    experiment, which uses the same kind of location.

    Raises:
        StorageError: the experiment was deleted, or its location is rejected.
        Exception: an error of MLflow's client, or of the client of the artifact store.
    """
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    has_experiment = tracking.client.get_experiment_by_name(EXPERIMENT_NAME) is not None
    experiment = tracking.client.get_experiment(tracking.experiment_id if has_experiment else _DEFAULT_EXPERIMENT_ID)
    location = f"{str(experiment.artifact_location).rstrip('/')}/{uuid.uuid4().hex}"
    check_location(location, tracking.uri)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "hpsearch-probe.txt"
        file.write_text("hpsearch")
        get_artifact_repository(f"{location}/artifacts", tracking_uri=tracking.uri).log_artifact(str(file))
    return location


def remove_probe(tracking: Tracking, location: str) -> None:
    """Remove the artifact that `write_probe` wrote, at the location that it returned."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    check_location(location, tracking.uri)
    get_artifact_repository(location, tracking_uri=tracking.uri).delete_artifacts()
