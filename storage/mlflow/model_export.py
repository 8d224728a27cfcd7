"""Export a model in MLflow's format, or store its checkpoint if torch.export fails."""

from __future__ import annotations

import contextlib
import io
import shutil
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpsearch.storage.mlflow.model import CHECKPOINT_FILE

if TYPE_CHECKING:
    import torch
    from mlflow.models import ModelSignature
    from torch import nn

# torch.export distinguishes dimensions of size 1 from all others.
_MIN_SIZE, _MAX_SIZE = 2, 2**31


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
    """Raise ValueError if the exported model has a fixed dynamic dimension, or does not accept all batch sizes above 1.

    `torch.export` may specialize dynamic dimensions to sizes like those of the example without an error. For example,
    `torch.cdist` uses other code for more than 25 rows. Limits of other dimensions can be those of the model.
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
            bounds = program.range_constraints.get(size.node.expr)
            if dim == 0 and bounds is not None and (bounds.lower > _MIN_SIZE or bounds.upper < _MAX_SIZE):
                limits = f"{bounds.lower} to {bounds.upper}"
                raise ValueError(f"torch.export limited dimension {dim} of {name or 'inputs'} to sizes from {limits}")


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
