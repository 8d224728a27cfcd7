"""Models in MLflow: export a model, upload it, link it to a run."""

from __future__ import annotations

import contextlib
import io
import shutil
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpsearch.kill_points import kill_point
from hpsearch.storage.attributes import MODEL
from hpsearch.storage.journals.journal_records import Model
from hpsearch.storage.mlflow import tag_names
from hpsearch.storage.mlflow.client import Tracking, list_model_ids, make_metrics
from hpsearch.storage.mlflow.run_links import RunLinks

if TYPE_CHECKING:
    import torch
    from mlflow import MlflowClient
    from mlflow.models import ModelSignature
    from torch import nn


READY_STATUS = "READY"


def export_model(
    model: nn.Module, inputs: Sequence[tuple[str, torch.Tensor]], dynamic_dims: Sequence[Collection[int]], folder: Path
) -> None:
    """Export a model in MLflow's format: exported graph, signature, input example, requirements.

    `mlflow.pytorch.log_model` is not used, because it needs more time for additional steps than for the export: it
    loads the exported model for a test, and reads the history of every metric to link one point to the model.

    Args:
        model: the model, in eval mode on the CPU; exported by ``torch.export`` with a dynamic batch dimension.
        inputs: a batch of at least two samples per input, as (name, tensor), in the order of the model's arguments.
        dynamic_dims: for each input, the dimensions with dynamic size.
        folder: the output folder, which is replaced if it exists.

    Raises:
        Exception: ``torch.export`` cannot export the model.
    """
    import mlflow.pytorch
    import torch

    shutil.rmtree(folder, ignore_errors=True)
    arrays = [tensor.numpy() for _, tensor in inputs]
    with torch.inference_mode():
        output: Any = model(*(tensor for _, tensor in inputs))
    # The exporter's progress output does not belong in a worker's log.
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        mlflow.pytorch.save_model(
            model,
            str(folder),
            input_example=arrays[0] if len(arrays) == 1 and not inputs[0][0] else tuple(arrays),
            signature=_make_signature(inputs, dynamic_dims, output),
            # Explicit, because MLflow infers requirements by loading the model in a new process, which takes 8-11 s.
            pip_requirements=[f"torch=={torch.__version__.partition('+')[0]}", "numpy"],
            serialization_format="pt2",
        )
    _check_dynamic_dims(folder, inputs, dynamic_dims)


def _check_dynamic_dims(
    folder: Path, inputs: Sequence[tuple[str, torch.Tensor]], dynamic_dims: Sequence[Collection[int]]
) -> None:
    """Raise ValueError if the exported model accepts only the example's sizes in a dynamic dimension.

    `torch.export` may specialize dynamic dimensions to the sizes of the example without an error.
    """
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.load(folder / "data" / "model.pt2")
    names = program.graph_signature.user_inputs
    shapes = {node.name: node.meta["val"].shape for node in program.graph.nodes if node.name in names}
    for traced_name, (name, _), dims in zip(names, inputs, dynamic_dims, strict=True):
        for dim in dims:
            if isinstance(size := shapes[str(traced_name)][dim], int):
                raise ValueError(f"torch.export fixed dimension {dim} of {name or 'inputs'} at size {size}")


def _make_signature(
    inputs: Sequence[tuple[str, torch.Tensor]], dynamic_dims: Sequence[Collection[int]], output: Any
) -> ModelSignature:
    """Return the MLflow signature of a model; an output that is not a single tensor is omitted."""
    import torch
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    input_specs = [
        TensorSpec(
            tensor.numpy().dtype,
            tuple(-1 if dim in dims else size for dim, size in enumerate(tensor.shape)),
            name or None,
        )
        for (name, tensor), dims in zip(inputs, dynamic_dims, strict=True)
    ]
    outputs = None
    if isinstance(output, torch.Tensor):
        outputs = Schema([TensorSpec(output.numpy().dtype, (-1, *output.shape[1:]))])
    return ModelSignature(inputs=Schema(input_specs), outputs=outputs)


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


def write_checkpoint_model(checkpoint: Path, folder: Path, *, objective: str, reason: str) -> None:
    """Write a checkpoint in MLflow's model format, which only the code of the objective can load.

    Args:
        checkpoint: the trial's `best.pt`, for ``torch.load(..., weights_only=True)``.
        folder: the output folder, which is replaced if it exists.
        objective: the reference of the objective whose code builds the model.
        reason: why the model cannot be exported.

    Raises:
        OSError: the disk is full.
    """
    from mlflow.models import Model

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copyfile(checkpoint, folder / CHECKPOINT_FILE)
    model = Model()
    model.add_flavor("hpsearch", checkpoint=CHECKPOINT_FILE, objective=objective, not_exported=reason)
    model.save(str(folder / "MLmodel"))


def read_export_failure(client: MlflowClient, model_id: str | None) -> str:
    """Return the reason why a model is stored as a checkpoint instead of an exported model; empty if it is exported."""
    return "" if model_id is None else str(client.get_logged_model(model_id).tags.get(tag_names.WEIGHTS_ONLY, ""))


def download_checkpoint(model_id: str, folder: Path, *, tracking_uri: str) -> Path:
    """Download a model that is stored as a checkpoint to `folder`, and return the path of the checkpoint."""
    from mlflow.artifacts import download_artifacts

    path = download_artifacts(artifact_uri=f"models:/{model_id}", dst_path=str(folder), tracking_uri=tracking_uri)
    return Path(path) / CHECKPOINT_FILE
