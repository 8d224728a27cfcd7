"""What the runs of a study take up on the MLflow server: models and checkpoints, how large they are, their removal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpsearch.storage.errors import StorageError
from hpsearch.storage.mlflow import tag_names
from hpsearch.storage.mlflow.client import Tracking, models_of
from hpsearch.storage.mlflow.health import all_pages, mlflow_request, unless_missing

if TYPE_CHECKING:
    from mlflow.entities import Run

CHECKPOINTS = "checkpoints"  # the folder of a run that holds its best weights


@dataclass(frozen=True)
class Kept:
    """What a run has on the server that could be removed.

    Attributes:
        run_id: the run.
        model_id: its logged model; None without one.
        model_bytes: of the model's files.
        checkpoint_bytes: of its checkpoints.
    """

    run_id: str
    model_id: str | None
    model_bytes: int
    checkpoint_bytes: int


class RunStorage:
    """Looks at, and removes, what runs have on the server, through the server.

    Every method raises `StorageError`, in one line, when it is away or refuses.
    """

    def __init__(self, tracking: Tracking) -> None:
        self._tracking = tracking
        self._client = tracking.client

    def untouched(self, parent: str) -> dict[str, Run]:
        """Return the runs under a study's run of which nothing was removed yet: id to run."""
        query = f"tags.`mlflow.parentRunId` = '{parent}'"
        with mlflow_request(f"list the runs of {parent}"):
            runs = list(all_pages(self._client.search_runs, [self._tracking.experiment_id], query))
        return {str(run.info.run_id): run for run in runs if tag_names.REMOVED not in run.data.tags}

    def look(self, run: Run) -> Kept:
        """Return what a run has on the server."""
        run_id = str(run.info.run_id)
        model_id = next(iter(models_of(run)), None)
        with mlflow_request(f"list the files of run {run_id}"):
            if model_id is not None and unless_missing(self._client.get_logged_model, model_id) is None:
                model_id = None
            return Kept(
                run_id,
                model_id,
                _size(self._client.list_logged_model_artifacts, model_id) if model_id else 0,
                _size(self._client.list_artifacts, run_id, CHECKPOINTS),
            )

    def remove(self, kept: Kept) -> None:
        """Remove a run's model and checkpoints, files first: done again after a death, it goes on where it was.

        MLflow keeps the rows of a removed model until ``mlflow gc`` is run on the server.
        """
        with mlflow_request(f"remove the model of run {kept.run_id}"):
            run = self._client.get_run(kept.run_id)
            if kept.model_id and (model := unless_missing(self._client.get_logged_model, kept.model_id)):
                self._remove_files(str(model.artifact_location), of=kept.model_id)
                self._client.delete_logged_model(kept.model_id)
            if kept.checkpoint_bytes:
                self._remove_files(str(run.info.artifact_uri), of=kept.run_id, path=CHECKPOINTS)
            self._client.set_tag(kept.run_id, tag_names.REMOVED, "model and checkpoint")

    def _remove_files(self, place: str, *, of: str, path: str | None = None) -> None:
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        # Without a path the whole place goes: it must be that of this run or model, whatever the server says.
        if of not in place.split("/"):
            raise StorageError(f"the files of {of} are in {place}, which is not a place of its own: nothing is removed")
        get_artifact_repository(place, tracking_uri=self._tracking.uri).delete_artifacts(path)


def _size(list_files: Any, of: str, path: str | None = None) -> int:
    """Return the bytes of all files in a folder and below."""
    return sum(
        _size(list_files, of, entry.path) if entry.is_dir else int(entry.file_size or 0)
        for entry in list_files(of, path)
    )
