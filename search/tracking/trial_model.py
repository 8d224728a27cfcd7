"""The registrable model of a trial: its files, and what the model's page in MLflow says of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
from hpsearch.objectives.training.result import Exported
from hpsearch.search.spec.spec import StudySpec
from hpsearch.storage.journals import journal_records
from hpsearch.storage.mlflow import exported_model
from hpsearch.storage.mlflow.weights_model import WEIGHTS_ONLY, keep_weights

log = logging.getLogger(__name__)


def write_model(
    exported: Callable[[], Exported], folder: Path, *, checkpoint: Path | None, objective: str, number: int
) -> dict[str, str]:
    """Export the model, or else keep its checkpoint, and return the tags that say why.

    Args:
        exported: makes what there is to export.
        folder: where to; replaced when it exists.
        checkpoint: the trial's `best.pt`, where there is one.
        objective: reference of the objective.
        number: the trial's.

    Raises:
        OSError: there is no room.
        Exception: it cannot be exported, and there is no checkpoint; whatever ``torch.export`` says of it.
    """
    try:
        exported_model.export_model(*exported(), folder)
        return {}
    except Exception as error:  # whatever torch.export says of it
        if isinstance(error, OSError) or checkpoint is None:
            raise
        why = told(error)
    log.warning("trial %d: its model cannot be exported: it is its checkpoint (%s)", number, why)
    keep_weights(checkpoint, folder, objective=objective, why=why)
    return {WEIGHTS_ONLY: why}


def model_record(
    spec: StudySpec, number: int, params: Mapping[str, Any], best: EpochRecord, tags: Mapping[str, str]
) -> journal_records.Model:
    """Return what MLflow is told of the model of trial `number`, which is of its `best` epoch."""
    return journal_records.Model(
        name=f"{spec.name.replace('.', '_')}-trial-{number}",  # MLflow refuses dots
        step=best.epoch,
        at=best.timestamp,
        metrics=best.metrics,
        params=dict(params),
        tags={"hpsearch.study": spec.name, "hpsearch.trial": str(number), **tags},
    )


def run_params(spec: StudySpec, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a trial's run, and of its model: those that were suggested, and the study's own."""
    return {**params, "seed": spec.seed, "epochs": spec.epochs}


def told(error: Exception) -> str:
    """Return the first line of what an exporter says: the rest is where it was in torch."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first[:200]}"
