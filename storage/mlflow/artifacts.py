"""The artifacts of a trial's MLflow run, shown in the Optuna dashboard without a second copy of them.

The dashboard lists what a trial's system attributes name, and asks an artifact store for the content by an id of
hexadecimal digits. Such an id holds the run and the path, so that nothing has to be looked up.
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

from hpsearch.storage.mlflow.client import EXPERIMENT, Tracking

if TYPE_CHECKING:
    from mlflow import MlflowClient

# What a person opens; each costs the study an attribute that every worker reads once.
SHOWN = ("curves.png", "gradients.png", "report.md", "config.yaml", "metrics.jsonl")

PREFIX = "artifacts:"  # of Optuna's system attributes
_ID = re.compile(r"(?P<run>[0-9a-f]{32})-(?P<path>(?:[0-9a-f]{2})+)")


def artifact_attrs(run_id: str, names: Iterable[str]) -> dict[str, str]:
    """Return the system attributes by which the dashboard lists artifacts of a run, as `upload_artifact` writes them.

    Args:
        run_id: the run that has them.
        names: paths from its root; those of `SHOWN` are listed.
    """
    attrs = {}
    for name in (name for name in names if name in SHOWN):
        artifact_id = artifact_id_of(run_id, name)
        mimetype, encoding = mimetypes.guess_type(name)
        # A browser shows text, and offers to save what it does not know.
        kind = mimetype if mimetype is not None and mimetype.startswith("image/") else "text/plain; charset=utf-8"
        described = {"artifact_id": artifact_id, "filename": name, "mimetype": kind, "encoding": encoding}
        attrs[PREFIX + artifact_id] = json.dumps(described)
    return attrs


def artifact_id_of(run_id: str, path: str) -> str:
    """Return the id of a run's artifact: of hexadecimal digits and dashes, as the dashboard's routes want it."""
    return f"{run_id}-{path.encode().hex()}"


def read_artifact(client: MlflowClient, run_id: str, path: str) -> BinaryIO:
    """Return an artifact of a run, open for reading; its temporary file goes when it is closed.

    Raises:
        MlflowException: the server is away, or has no such artifact.
    """
    with tempfile.TemporaryDirectory(prefix="hpsearch-") as folder:
        return Path(client.download_artifacts(run_id, path, folder)).open("rb")


class RunArtifacts:
    """Optuna's artifact store over the artifacts of MLflow runs: it reads.

    Args:
        client: makes, or remembers, a client of the MLflow server.
    """

    def __init__(self, client: Callable[[], MlflowClient]) -> None:
        self._client = client

    def open_reader(self, artifact_id: str) -> BinaryIO:
        """Return the content of an artifact.

        Raises:
            ArtifactNotFound: MLflow does not have it, or is away.
        """
        match = _ID.fullmatch(artifact_id)
        if match is None:
            raise ArtifactNotFound(f"no artifact {artifact_id!r}")
        try:
            path = bytes.fromhex(match["path"]).decode()
            if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or "\\" in path:
                raise ArtifactNotFound(f"no artifact {path!r}")
            return read_artifact(self._client(), match["run"], path)
        except ArtifactNotFound:
            raise
        except Exception as error:  # away, deleted, refused: nothing to show
            raise ArtifactNotFound(f"MLflow does not give {artifact_id}: {error}") from None

    def write(self, artifact_id: str, content_body: BinaryIO) -> None:  # noqa: ARG002 the interface is Optuna's
        """Refuse: what a trial leaves is logged to its run by its worker."""
        raise PermissionError("artifacts are read-only here: log them to the MLflow run")

    def remove(self, artifact_id: str) -> None:
        """Leave the artifact in MLflow; the dashboard forgets it, such as when it deletes a study."""


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
