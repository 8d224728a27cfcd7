"""The model of a trial's run, made in MLflow: by what ships its journal, or later from its best checkpoint."""

from __future__ import annotations

from pathlib import Path

from hpsearch.storage.attributes import MODEL
from hpsearch.storage.journals.journal_records import Model
from hpsearch.storage.mlflow import exported_model
from hpsearch.storage.mlflow.client import MODEL_ID, Tracking, epoch_metrics
from hpsearch.storage.mlflow.run_links import RunLinks


def create_model(tracking: Tracking, run_id: str, record: Model) -> str:
    """Create the model of a run, without its files yet, and return its id; call it while nobody else does."""
    params = {key: str(value) for key, value in record.params.items()}
    model = tracking.client.create_logged_model(
        tracking.experiment_id, name=record.name, source_run_id=run_id, params=params, tags=record.tags, model_type=""
    )
    return str(model.model_id)


def fill_model(tracking: Tracking, model_id: str, run_id: str, record: Model, folder: Path) -> None:
    """Give a model its metrics and the files that `export_model` wrote to `folder`; safe to repeat."""
    # The points are in the run already: sent again with the model's id they are linked to it.
    linked = epoch_metrics(record.step, record.at, record.metrics, model_id)
    tracking.log(run_id, metrics=linked, tags={MODEL_ID: model_id})
    exported_model.upload_model(tracking.client, model_id, run_id, folder)


def make_model(tracking: Tracking, links: RunLinks, trial_id: int, run_id: str, record: Model, folder: Path) -> str:
    """Make the model of a run that has none, or go on with one that was begun; return its id.

    Args:
        tracking: the tracking server.
        links: what the study's database notes of runs.
        trial_id: the trial.
        run_id: its run.
        record: what the model is.
        folder: what `export_model` wrote.

    Raises:
        AwayError: another process makes it, or this one took too long.
        Exception: whatever MLflow's client raises.
    """
    client = tracking.client
    with links.locked(trial_id) as noted:
        # What the database notes is not asked: somebody may have deleted that one.
        model = exported_model.find_model(client, tracking.experiment_id, run_id)
        model = model or create_model(tracking, run_id, record)
        exported_model.link_model(client, model, run_id, step=record.step)
        noted.note({MODEL: model})
    fill_model(tracking, model, run_id, record, folder)
    return model
