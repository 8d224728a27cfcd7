"""Models in MLflow: export, upload, link to the run."""

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
from hpsearch.storage.mlflow.client import Tracking, epoch_metrics, models_of
from hpsearch.storage.mlflow.run_links import RunLinks

if TYPE_CHECKING:
    import torch
    from mlflow import MlflowClient
    from mlflow.models import ModelSignature
    from torch import nn


READY = "READY"


def export_model(
    model: nn.Module, inputs: Sequence[tuple[str, torch.Tensor]], free: Sequence[Collection[int]], folder: Path
) -> None:
    """Write the model as MLflow keeps it: exported graph, signature, input example, requirements.

    `mlflow.pytorch.log_model` does this, loads the result again to try it, and reads the history of every metric of the
    run to link one point of it; the two latter cost more than the export.

    Args:
        model: in eval mode and on the CPU; exported by ``torch.export`` with a free batch dimension.
        inputs: a batch of at least two raw inputs, as the model takes them one after the other, by name.
        free: the dimensions of each whose size is not always the same.
        folder: where to; replaced when it exists.

    Raises:
        Exception: the model cannot be exported; whatever ``torch.export`` says of it.
    """
    import mlflow.pytorch
    import torch

    shutil.rmtree(folder, ignore_errors=True)
    arrays = [tensor.numpy() for _, tensor in inputs]
    with torch.inference_mode():
        output: Any = model(*(tensor for _, tensor in inputs))
    # What the exporter prints about its progress is of no use in a worker's log.
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        mlflow.pytorch.save_model(
            model,
            str(folder),
            input_example=arrays[0] if len(arrays) == 1 and not inputs[0][0] else tuple(arrays),
            signature=_signature(inputs, free, output),
            # Given, because inferring them loads the model in a new process: 8-11 s.
            pip_requirements=[f"torch=={torch.__version__.partition('+')[0]}", "numpy"],
            serialization_format="pt2",
        )
    _check_sizes(folder, inputs, free)


def _check_sizes(folder: Path, inputs: Sequence[tuple[str, torch.Tensor]], free: Sequence[Collection[int]]) -> None:
    """Refuse a model that takes only the sizes of the example: `torch.export` says nothing when it fixes one."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.load(folder / "data" / "model.pt2")
    names = program.graph_signature.user_inputs
    taken = {node.name: node.meta["val"].shape for node in program.graph.nodes if node.name in names}
    for traced, (name, _), unbound in zip(names, inputs, free, strict=True):
        for dim in unbound:
            if isinstance(size := taken[str(traced)][dim], int):
                raise ValueError(f"it would take {name or 'inputs'} of size {size} in dimension {dim} alone")


def _signature(
    inputs: Sequence[tuple[str, torch.Tensor]], free: Sequence[Collection[int]], output: Any
) -> ModelSignature:
    """The types of inputs and output: of several outputs nothing is said."""
    import torch
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    taken = [
        TensorSpec(
            tensor.numpy().dtype,
            tuple(-1 if dim in unbound else size for dim, size in enumerate(tensor.shape)),
            name or None,
        )
        for (name, tensor), unbound in zip(inputs, free, strict=True)
    ]
    given = [TensorSpec(output.numpy().dtype, (-1, *output.shape[1:]))] if isinstance(output, torch.Tensor) else None
    return ModelSignature(inputs=Schema(taken), outputs=None if given is None else Schema(given))


def link_model(client: MlflowClient, model_id: str, run_id: str, *, step: int) -> None:
    """Tell a run of its model, once; call it while nobody else does."""
    from mlflow.entities import LoggedModelOutput

    if model_id not in models_of(client.get_run(run_id)):
        client.log_outputs(run_id, [LoggedModelOutput(model_id, step=step)])


@kill_point("upload model")
def upload_model(client: MlflowClient, model_id: str, run_id: str, folder: Path) -> None:
    """Give a model its files, unless it has them; safe to repeat.

    Args:
        client: of the tracking server.
        model_id: the model, by `hpsearch.storage.mlflow.model.create_model`.
        run_id: the run that made it.
        folder: what `export_model` wrote.
    """
    from mlflow.models import Model

    model = client.get_logged_model(model_id)
    if model.status == READY:
        return
    written = Model.load(str(folder))
    written.run_id, written.model_id, written.model_uuid = run_id, model_id, model_id
    written.artifact_path = model.artifact_location
    written.save(str(folder / "MLmodel"))
    client.log_model_artifacts(model_id, str(folder))
    client.finalize_logged_model(model_id, READY)


@kill_point("create model")
def create_model(tracking: Tracking, run_id: str, record: Model) -> str:
    """Create the model of a run, without its files yet, and return its id; call it while nobody else does."""
    params = {key: str(value) for key, value in record.params.items()}
    model = tracking.client.create_logged_model(
        tracking.experiment_id, name=record.name, source_run_id=run_id, params=params, tags=record.tags, model_type=""
    )
    return str(model.model_id)


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
        # The server is asked, not the database: a person may have deleted the model that the database names.
        found = client.search_logged_models([tracking.experiment_id], f"source_run_id = '{run_id}'", max_results=1)
        model = str(found[0].model_id) if found else create_model(tracking, run_id, record)
        link_model(client, model, run_id, step=record.step)
        noted.note({MODEL: model})
    # The run has these points already: sent again with the model's id, they are linked to it.
    linked = epoch_metrics(record.step, record.at, record.metrics, model)
    tracking.log(run_id, metrics=linked, tags={tag_names.MODEL_ID: model})
    upload_model(client, model, run_id, folder)
    return model


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
    return "" if model_id is None else str(client.get_logged_model(model_id).tags.get(tag_names.WEIGHTS_ONLY, ""))


def fetch_checkpoint(model_id: str, folder: Path, *, tracking_uri: str) -> Path:
    """Bring the checkpoint of such a model into a folder."""
    from mlflow.artifacts import download_artifacts

    found = download_artifacts(artifact_uri=f"models:/{model_id}", dst_path=str(folder), tracking_uri=tracking_uri)
    return Path(found) / CHECKPOINT
