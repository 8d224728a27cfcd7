"""Models in MLflow: create a logged model, upload its files, and link it to a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hpsearch.kill_points import kill_point
from hpsearch.storage.attributes import MODEL
from hpsearch.storage.journals.journal_records import Model
from hpsearch.storage.mlflow import tag_names
from hpsearch.storage.mlflow.client import Tracking, list_model_ids, make_metrics
from hpsearch.storage.mlflow.run_links import RunLinks

if TYPE_CHECKING:
    from mlflow import MlflowClient


READY_STATUS = "READY"


def link_model(client: MlflowClient, model_id: str, run_id: str, *, step: int) -> None:
    """Add a model to the outputs of a run, unless the run has this output; the caller holds the lock of the run."""
    from mlflow.entities import LoggedModelOutput

    if model_id not in list_model_ids(client.get_run(run_id)):
        client.log_outputs(run_id, [LoggedModelOutput(model_id, step=step)])


@kill_point("upload model")
def upload_model(client: MlflowClient, model_id: str, run_id: str, folder: Path) -> None:
    """Upload the files of a logged model, unless they are complete on the server. Safe to repeat.

    Args:
        client: a client of the tracking server.
        model_id: the id of the model, from `create_model`.
        run_id: the id of the model's run.
        folder: the folder that `export_model` or `write_checkpoint_model` wrote.
    """
    from mlflow.models import Model

    model = client.get_logged_model(model_id)
    if model.status == READY_STATUS:
        return
    metadata = Model.load(str(folder))
    metadata.run_id, metadata.model_id, metadata.model_uuid = run_id, model_id, model_id
    metadata.artifact_path = model.artifact_location
    metadata.save(str(folder / "MLmodel"))
    client.log_model_artifacts(model_id, str(folder))
    client.finalize_logged_model(model_id, READY_STATUS)


@kill_point("create model")
def create_model(tracking: Tracking, run_id: str, record: Model) -> str:
    """Create the logged model of a run, without files, and return its id; the caller holds the lock of the run."""
    params = {key: str(value) for key, value in record.params.items()}
    model = tracking.client.create_logged_model(
        tracking.experiment_id, name=record.name, source_run_id=run_id, params=params, tags=record.tags, model_type=""
    )
    return str(model.model_id)


def ensure_model(tracking: Tracking, links: RunLinks, trial_id: int, run_id: str, record: Model, folder: Path) -> str:
    """Create the logged model of a run, or complete a model whose creation was interrupted; return the model's id.

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
        model_id = str(found[0].model_id) if found else create_model(tracking, run_id, record)
        link_model(client, model_id, run_id, step=record.step)
        trial_links.set_attrs({MODEL: model_id})
    # The run already has these metric points; sending them again with the model's id links them to the model.
    metrics = make_metrics(record.step, record.at, record.metrics, model_id)
    tracking.log(run_id, metrics=metrics, tags={tag_names.MODEL_ID: model_id})
    upload_model(client, model_id, run_id, folder)
    return model_id


CHECKPOINT_FILE = "checkpoint.pt"


def read_export_failure(client: MlflowClient, model_id: str | None) -> str:
    """Return the reason why a model is stored as a checkpoint instead of an exported model; empty if it is exported."""
    return "" if model_id is None else str(client.get_logged_model(model_id).tags.get(tag_names.WEIGHTS_ONLY, ""))


def download_checkpoint(model_id: str, folder: Path, *, tracking_uri: str) -> Path:
    """Download a model that is stored as a checkpoint to `folder`, and return the path of the checkpoint."""
    from mlflow.artifacts import download_artifacts

    path = download_artifacts(artifact_uri=f"models:/{model_id}", dst_path=str(folder), tracking_uri=tracking_uri)
    return Path(path) / CHECKPOINT_FILE
