"""The best weights of a trial, and the export of a model from these weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial

from hpsearch.objectives.base_objective import BaseObjective
from hpsearch.objectives.custom_loop.loop_objective import LoopObjective, config_from_json
from hpsearch.objectives.custom_loop.run import export_model
from hpsearch.objectives.fit import require_model_objective
from hpsearch.objectives.private_folders import open_temporary_folder
from hpsearch.objectives.training.checks.restore_best import RestoredModel, restore_best
from hpsearch.objectives.training.reproducibility import checkpoint
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
from hpsearch.objectives.training.result import ExportableModel
from hpsearch.search.console import format_command
from hpsearch.search.errors import SearchError
from hpsearch.search.study.checkpoint_origin import find_foreign_part, find_unsafe_part, replace_config
from hpsearch.search.study.ranking import get_first_value
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.tracking.trial_run import model_record, run_params, write_model
from hpsearch.storage.attributes import PENDING, REMOVED_BY, RUN_ID, TRACKING
from hpsearch.storage.mlflow.client import Tracking, sanitize_name
from hpsearch.storage.mlflow.health import describe_error, mlflow_request
from hpsearch.storage.mlflow.locations import check_id
from hpsearch.storage.mlflow.model import ensure_model
from hpsearch.storage.mlflow.run_links import RunLinks

_VALUE_TOLERANCE = 0.01  # relative tolerance, because another device may give other results for single samples


@dataclass(frozen=True)
class BestWeights:
    """The best weights of a trial.

    Attributes:
        study: the study.
        trial: the trial.
        error_end: last clause of each error message, which states the action that did not take place.
    """

    study: StoredStudy
    trial: FrozenTrial
    error_end: str

    def fetch(self, tracking: Tracking, folder: Path) -> Path:
        """Download the checkpoint with the best weights from the trial's MLflow run, and return its path.

        Raises:
            SearchError: the weights are unavailable.
        """
        name, number = self.study.spec.name, self.trial.number
        run_id = self.trial.user_attrs.get(RUN_ID)
        if run_id is None:
            raise SearchError(f"trial {number} of {name!r} has no MLflow run with its weights; {self.error_end}")
        if removed := self.trial.user_attrs.get(REMOVED_BY):
            raise SearchError(f"the weights of trial {number} were deleted ({removed}); {self.error_end}")
        try:
            return Path(tracking.client.download_artifacts(check_id(str(run_id)), "checkpoints/best.pt", str(folder)))
        except Exception as error:  # MLflow's client raises errors of its transport
            send = format_command("sync", name)
            raise SearchError(
                f"the weights of trial {number}, checkpoints/best.pt of its run {run_id} in MLflow, are unavailable "
                f"({describe_error(error)}); {self.error_end}; if another machine has the file, run {send} there"
            ) from None

    def read(self, path: Path, objective: BaseObjective) -> dict[str, Any]:
        """Return the content of the checkpoint file, with the configuration that the objective suggests for the trial.

        Raises:
            SearchError: the file is damaged, or does not belong to the trial, or the objective rejects the trial.
        """
        number = self.trial.number
        try:
            best = checkpoint.read(path)
        except checkpoint.CheckpointError as error:
            raise SearchError(f"the weights of trial {number} are unusable: {error}; {self.error_end}") from None
        if foreign := find_foreign_part(self.study, self.trial, best):
            raise SearchError(
                f"checkpoints/best.pt in the run of trial {number} belongs to another training run "
                f"({foreign}); {self.error_end}; restore the file that the trial logged"
            )
        if unsafe := find_unsafe_part(best):
            raise SearchError(f"checkpoints/best.pt of trial {number} was not loaded: {unsafe}; {self.error_end}")
        return replace_config(objective, self.trial, best)

    def verify_score(self, restored: RestoredModel) -> None:
        """Check that the weights reproduce the validation value of the trial.

        Raises:
            SearchError: the weights have another value, for example because the code or the data have changed.
        """
        metric = self.study.spec.metric
        now, then = restored.validate()[metric], float(get_first_value(self.trial) or 0.0)
        if not math.isclose(now, then, rel_tol=_VALUE_TOLERANCE, abs_tol=1e-6):
            raise SearchError(
                f"the weights of trial {self.trial.number} give val {metric} {now:.6g} now and gave {then:.6g} in "
                f"the search; {self.error_end}; restore the code and data of the study"
            )


def make_model_from_checkpoint(study: StoredStudy, trial: FrozenTrial, tracking: Tracking) -> str:
    """Make the model of a COMPLETE trial that has no model, and return the id of the model. Idempotent.

    Raises:
        SearchError: the weights are unavailable or do not match the trial, or its objective exports no model.
        ObjectiveError: the weights do not fit the current code.
        StorageError: MLflow is unavailable or rejects the model, or another process is making the model.
    """
    missing = f"--trial {trial.number}: MLflow has no model of this trial"
    if removed := trial.user_attrs.get(REMOVED_BY):
        raise SearchError(f"{missing} ({removed}); promote a trial with a model")
    if (known := str(trial.user_attrs.get(TRACKING, ""))).startswith(PENDING):
        raise SearchError(f"{missing} yet ({known}); send the model with {format_command('sync', study.spec.name)}")
    weights = BestWeights(study, trial, error_end="nothing was promoted")
    with open_temporary_folder() as folder:
        run_id = str(trial.user_attrs[RUN_ID])
        path = weights.fetch(tracking, folder)
        objective = study.objective()
        best = weights.read(path, objective)
        number, spec = trial.number, study.spec
        module = _make_exporter(objective, weights, best)
        tags = write_model(module, folder / "model", checkpoint=path, objective=spec.objective, number=number)
        with mlflow_request(f"store the model of trial {number}"):
            epoch = _read_best_epoch(tracking, run_id, f"val_{spec.metric}", best)
            record = model_record(spec, number, run_params(spec, trial.params), epoch, tags)
            return ensure_model(tracking, RunLinks(study.engine), trial._trial_id, run_id, record, folder / "model")


def _make_exporter(
    objective: BaseObjective, weights: BestWeights, best: dict[str, Any]
) -> Callable[[], ExportableModel]:
    """Return a function that exports the model.

    Without a custom training loop, first verify the score of the weights.
    """
    if isinstance(objective, LoopObjective):  # only a custom loop can measure its value
        if not objective.defines("export"):
            raise SearchError(
                f"--trial {weights.trial.number}: {objective.name} exports no model; write it as a LoopObjective with "
                "the method export()"
            )
        return partial(export_model, objective, best["model"], config_from_json(objective, best["config"]))
    restored = restore_best(require_model_objective(objective, "a model"), best)
    weights.verify_score(restored)
    return restored.exportable_model


def _read_best_epoch(tracking: Tracking, run_id: str, key: str, best: dict[str, Any]) -> EpochRecord:
    """Return the record of the best epoch, with its timestamp in MLflow.

    With another timestamp, MLflow would have the epoch twice.
    """
    history = tracking.client.get_metric_history(run_id, sanitize_name(key))
    at = next((point.timestamp for point in history if point.step == best["epoch"]), int(time.time() * 1000))
    # The middle of a millisecond, so that rounding to MLflow's milliseconds gives the same one.
    return EpochRecord(epoch=best["epoch"], metrics=dict(best["metrics"]), timestamp=(at + 0.5) / 1000)
