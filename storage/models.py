"""The registrable model of a trial: MLflow's ``pt2`` format, which runs no code of ours when it is loaded."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


def log_model(
    run_id: str,
    model: nn.Module,
    example: torch.Tensor,
    *,
    name: str,
    step: int,
    tags: dict[str, str],
) -> str:
    """Export `model` and log it to the run; return the id of the logged model.

    The server is the one of the process's :class:`storage.tracking.Tracking`.

    Args:
        run_id: the run the model belongs to.
        model: in eval mode and on the CPU; exported by ``torch.export`` with a free batch dimension.
        example: a batch of at least two raw inputs, as the model takes them.
        name: what the MLflow UI lists the model under.
        step: the epoch whose metrics are the model's; they are to be logged before.
        tags: of the logged model.
    """
    import mlflow.pytorch
    import torch
    from mlflow.models import infer_signature

    with torch.inference_mode():
        output: Any = model(example)
    inputs = example.numpy()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        info = mlflow.pytorch.log_model(
            model,
            name=name,
            input_example=inputs,
            signature=infer_signature(inputs, output.numpy()),
            # Given, because inferring them loads the model in a new process: 8-11 s.
            pip_requirements=[f"torch=={torch.__version__.partition('+')[0]}", "numpy"],
            serialization_format="pt2",
            step=step,
            tags=tags,
            run_id=run_id,
        )
    return str(info.model_id)
