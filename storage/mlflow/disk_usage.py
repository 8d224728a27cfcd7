"""The disk usage of the runs of a study on the MLflow server, and the removal of models and checkpoints of runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tenacity

from hpsearch.storage.errors import StorageError
from hpsearch.storage.mlflow import tag_names
from hpsearch.storage.mlflow.client import Tracking, list_model_ids
from hpsearch.storage.mlflow.health import get_or_none, is_unreachable, iterate_pages, mlflow_request
from hpsearch.storage.mlflow.locations import check_id, check_removable

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.store.artifact.artifact_repo import ArtifactRepository

CHECKPOINT_FOLDER = "checkpoints"  # the artifact folder with the best weights of a run


@dataclass(frozen=True)
class RunDiskUsage:
    """The removable files of a run on the MLflow server.

    Attributes:
        run_id: the id of the run.
        model_id: the id of the run's logged model; None if the run has no logged model.
        model_bytes: the size of the model's files.
        checkpoint_bytes: the size of the run's checkpoints.
    """

    run_id: str
    model_id: str | None
    model_bytes: int
    checkpoint_bytes: int


class RunStorage:
    """Measures and removes the files of runs, through the tracking server.

    Every method raises `StorageError` if the server is unavailable or rejects the request.
    """

    def __init__(self, tracking: Tracking) -> None:
        self._tracking = tracking
        self._client = tracking.client

    def list_runs_with_files(self, parent: str) -> dict[str, Run]:
        """Return the child runs of a study's run from which nothing was removed yet, by run id."""
        query = f"tags.`mlflow.parentRunId` = '{parent}'"
        with mlflow_request(f"list the runs of {parent}"):
            runs = list(iterate_pages(self._client.search_runs, [self._tracking.experiment_id], query))
        return {str(run.info.run_id): run for run in runs if tag_names.REMOVED not in run.data.tags}

    def get_disk_usage(self, run: Run) -> RunDiskUsage:
        """Return the disk usage of a run, which requires a request per folder."""
        run_id = str(run.info.run_id)
        model_id = next(iter(list_model_ids(run)), None)
        with mlflow_request(f"list the files of run {run_id}"):
            if model_id is not None and get_or_none(self._client.get_logged_model, model_id) is None:
                model_id = None
            return RunDiskUsage(
                run_id,
                model_id,
                _compute_bytes(self._client.list_logged_model_artifacts, model_id) if model_id else 0,
                _compute_bytes(self._client.list_artifacts, run_id, CHECKPOINT_FOLDER),
            )

    def remove(self, usage: RunDiskUsage) -> None:
        """Remove a run's model and checkpoints; a second call completes an interrupted removal.

        MLflow keeps the rows of a removed model until ``mlflow gc`` is run on the server.
        """
        with mlflow_request(f"remove the model of run {usage.run_id}"):
            run = self._client.get_run(usage.run_id)
            if usage.model_id and (model := get_or_none(self._client.get_logged_model, usage.model_id)):
                self._remove_files(str(model.artifact_location), usage.model_id)
                get_or_none(self._client.delete_logged_model, usage.model_id)
            if usage.checkpoint_bytes:
                self._remove_files(str(run.info.artifact_uri), usage.run_id, path=CHECKPOINT_FOLDER)
            self._mark_as_removed(usage.run_id)

    def _mark_as_removed(self, run_id: str) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._client.set_tag(run_id, tag_names.REMOVED, "model and checkpoint")
        except MlflowException:  # MLflow's server rejects one of two requests that set a new tag at the same time
            if tag_names.REMOVED not in self._client.get_run(run_id).data.tags:
                raise

    def _remove_files(self, location: str, owner_id: str, path: str | None = None) -> None:
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        # If `path` is None, the whole location is deleted, so the location must belong to this run or model only.
        check_removable(location, self._tracking.uri)
        if check_id(owner_id) not in location.split("/"):
            raise StorageError(f"artifact location {location} does not contain the id {owner_id}; nothing is removed")
        _delete(get_artifact_repository(location, tracking_uri=self._tracking.uri), path)


def _is_server_error(error: BaseException) -> bool:
    from mlflow.exceptions import MlflowException

    return isinstance(error, MlflowException) and not is_unreachable(error)


@tenacity.retry(
    retry=tenacity.retry_if_exception(_is_server_error),
    stop=tenacity.stop_after_attempt(5),
    wait=tenacity.wait_random(min=0.1, max=1.0),
    reraise=True,
)
def _delete(repository: ArtifactRepository, path: str | None) -> None:
    """Delete files; try again, because MLflow's server fails if another command deletes a file at the same time."""
    repository.delete_artifacts(path)


def _compute_bytes(list_files: Any, owner_id: str, path: str | None = None) -> int:
    """Return the size of all files in a folder and its subfolders."""
    return sum(
        _compute_bytes(list_files, owner_id, entry.path) if entry.is_dir else int(entry.file_size or 0)
        for entry in list_files(owner_id, path)
    )
