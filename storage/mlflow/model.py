"""Models in MLflow: create a logged model, upload its files, and link it to a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpsearch.kill_points import kill_point
from hpsearch.storage.attributes import MODEL, MODEL_SHA256
from hpsearch.storage.errors import StorageError
from hpsearch.storage.files import compute_folder_sha256
from hpsearch.storage.journals.journal_records import Model
from hpsearch.storage.mlflow import tag_names
from hpsearch.storage.mlflow.client import Tracking, list_model_ids, make_metrics, sanitize_name
from hpsearch.storage.mlflow.locations import check_id
from hpsearch.storage.mlflow.run_links import RunLinks

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel


READY_STATUS = "READY"


def link_model(client: MlflowClient, model_id: str, run_id: str, *, step: int) -> None:
    """Add a model to the outputs of a run, unless the run has this output; the caller holds the lock of the run."""
    from mlflow.entities import LoggedModelOutput

    if model_id not in list_model_ids(client.get_run(run_id)):
        client.log_outputs(run_id, [LoggedModelOutput(model_id, step=step)])


@kill_point("upload model")
def upload_model(client: MlflowClient, model_id: str, folder: Path) -> None:
    """Upload the files of a logged model. Safe to repeat."""
    client.log_model_artifacts(model_id, str(folder))
    client.finalize_logged_model(model_id, READY_STATUS)


def _write_ids(model: LoggedModel, run_id: str, folder: Path) -> None:
    """Write the ids of a logged model to the metadata among its files."""
    import yaml
    from mlflow.models import Model

    # `Model.load` would decode a "%20" in the path.
    metadata = Model.from_dict(yaml.safe_load((folder / "MLmodel").read_text(encoding="utf-8")))
    metadata.run_id, metadata.model_id, metadata.model_uuid = run_id, model.model_id, model.model_id
    metadata.artifact_path = model.artifact_location
    metadata.save(str(folder / "MLmodel"))


@kill_point("create model")
def create_model(tracking: Tracking, run_id: str, record: Model) -> LoggedModel:
    """Create the logged model of a run, without files; the caller holds the lock of the run."""
    params = {sanitize_name(key): str(value) for key, value in record.params.items()}
    return tracking.client.create_logged_model(
        tracking.experiment_id, name=record.name, source_run_id=run_id, params=params, tags=record.tags, model_type=""
    )


def ensure_model(tracking: Tracking, links: RunLinks, trial_id: int, run_id: str, record: Model, folder: Path) -> str:
    """Create the logged model of a run, or complete a model whose creation was interrupted; return the model's id.

    The database has the digest of the files before MLflow has the files, because other users may change them there.

    Args:
        tracking: the tracking server.
        links: the links from trials to runs in the study's database.
        trial_id: the id of the trial in the database.
        run_id: the id of the trial's run.
        record: the description of the model.
        folder: the folder that `export_model` or `write_checkpoint_model` wrote.

    Raises:
        ServiceUnavailableError: another process is creating the model, or this process lost the lock of the run.
        Exception: an error of MLflow's client.
    """
    client = tracking.client
    with links.lock_run(trial_id) as trial_links:
        # The model is looked up on the server, because a user may have deleted the model whose id the database has.
        found = client.search_logged_models([tracking.experiment_id], f"source_run_id = '{run_id}'", max_results=1)
        model = found[0] if found else create_model(tracking, run_id, record)
        model_id, is_complete = str(model.model_id), model.status == READY_STATUS
        link_model(client, model_id, run_id, step=record.step)
        attrs: dict[str, Any] = {MODEL: model_id}
        if not is_complete:
            _write_ids(model, run_id, folder)
            attrs[MODEL_SHA256] = {model_id: compute_folder_sha256(folder)}
        trial_links.set_attrs(attrs)
    # The run already has these metric points; sending them again with the model's id links them to the model.
    metrics = make_metrics(record.step, record.at, record.metrics, model_id)
    tracking.log(run_id, metrics=metrics, tags={tag_names.MODEL_ID: model_id})
    if not is_complete:
        upload_model(client, model_id, folder)
    return model_id


CHECKPOINT_FILE = "checkpoint.pt"


def read_export_failure(client: MlflowClient, model_id: str | None) -> str:
    """Return the reason why a model is stored as a checkpoint instead of an exported model; empty if it is exported."""
    return "" if model_id is None else str(_read_tags(client, model_id).get(tag_names.WEIGHTS_ONLY, ""))


def read_export_source(client: MlflowClient, model_id: str | None) -> str:
    """Return the method of the objective that returned the exported module; empty if it is the trained model."""
    return "" if model_id is None else str(_read_tags(client, model_id).get(tag_names.EXPORT_SOURCE, ""))


def _read_tags(client: MlflowClient, model_id: str) -> dict[str, str]:
    from mlflow.exceptions import MlflowException

    try:
        return dict(client.get_logged_model(model_id).tags)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        raise StorageError(f"model {model_id} was deleted in MLflow meanwhile, for example by gc") from None


def download_model(model_id: str, folder: Path, *, tracking_uri: str) -> Path:
    """Download all files of a logged model to a new folder in `folder`, and return the new folder."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    target = folder / check_id(model_id)
    target.mkdir()
    # Not MLflow's download_artifacts, which prefers a file of the working folder whose path is this address.
    repository = get_artifact_repository(f"models:/{model_id}", tracking_uri=tracking_uri)
    repository.download_artifacts("", dst_path=str(target))
    (target / "registered_model_meta").unlink(missing_ok=True)  # MLflow's client adds this file to the download
    return target
