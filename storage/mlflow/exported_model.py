"""The registrable model of a trial: MLflow's ``pt2`` format, which runs no code of ours when it is loaded."""

from __future__ import annotations

import contextlib
import io
import shutil
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


def find_model(client: MlflowClient, experiment_id: str, run_id: str) -> str | None:
    """Return the id of the model that a run has already."""
    found = client.search_logged_models([experiment_id], f"source_run_id = '{run_id}'", max_results=1)
    return str(found[0].model_id) if found else None


def link_model(client: MlflowClient, model_id: str, run_id: str, *, step: int) -> None:
    """Tell a run of its model, once; call it while nobody else does."""
    from mlflow.entities import LoggedModelOutput

    outputs = client.get_run(run_id).outputs
    if model_id not in {output.model_id for output in (outputs.model_outputs if outputs else [])}:
        client.log_outputs(run_id, [LoggedModelOutput(model_id, step=step)])


def upload_model(client: MlflowClient, model_id: str, run_id: str, folder: Path) -> None:
    """Give a model its files, unless it has them; safe to repeat.

    Args:
        client: of the tracking server.
        model_id: the model, by `hpsearch.storage.mlflow.model_of_run.create_model`.
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
