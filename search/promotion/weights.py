"""The best weights of a trial, and a registrable model made of them."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial

from hpsearch.objectives.fit import model_objective
from hpsearch.objectives.own_loop.loop_objective import LoopObjective, config_of
from hpsearch.objectives.own_loop.run import exported
from hpsearch.objectives.training.checks.held_out import Restored, restore_best
from hpsearch.objectives.training.reproducibility import checkpoint
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
from hpsearch.objectives.training.result import Exported
from hpsearch.search.console import command
from hpsearch.search.errors import SearchError
from hpsearch.search.samplers.suggest import training_seed
from hpsearch.search.study.ranking import first_value
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.tracking.trial_run import model_record, run_params, write_model
from hpsearch.storage.attributes import PENDING, REMOVED, RUN_ID, TRACKING
from hpsearch.storage.mlflow.client import Tracking, allowed_name
from hpsearch.storage.mlflow.health import describe_error, mlflow_request
from hpsearch.storage.mlflow.model import make_model
from hpsearch.storage.mlflow.run_links import RunLinks

_SAME = 0.01  # of the value: another device may judge a sample otherwise; changed code or data is further off


@dataclass(frozen=True)
class BestWeights:
    """The best weights of a trial; `undone` ends each refusal: what was not done for want of them."""

    study: StoredStudy
    trial: FrozenTrial
    undone: str

    def fetch(self, tracking: Tracking, folder: Path) -> Path:
        """Bring the best weights that the trial logged.

        Raises:
            SearchError: they are not to be had.
        """
        name, number = self.study.spec.name, self.trial.number
        run_id = self.trial.user_attrs.get(RUN_ID)
        if run_id is None:
            raise SearchError(f"trial {number} of {name!r} has no run in MLflow: its weights are not kept")
        if removed := self.trial.user_attrs.get(REMOVED):
            raise SearchError(f"the weights of trial {number} are not kept ({removed}); {self.undone}")
        try:
            return Path(tracking.client.download_artifacts(str(run_id), "checkpoints/best.pt", str(folder)))
        except Exception as error:  # MLflow's client raises what its transport does
            send = command("sync", name)
            raise SearchError(
                f"the weights of trial {number}, checkpoints/best.pt of its run {run_id} in MLflow, are not to be "
                f"had ({describe_error(error)}); {self.undone}; should they wait on a machine, send them: {send}"
            ) from None

    def read(self, path: Path) -> dict[str, Any]:
        """Return what the file holds.

        Raises:
            SearchError: it is torn, or of another training.
        """
        try:
            best = checkpoint.read(path)
        except checkpoint.CheckpointError as error:
            raise SearchError(
                f"the weights of trial {self.trial.number} cannot be used: {error}; {self.undone}"
            ) from None
        spec = self.study.spec
        wanted = {
            "seed": training_seed(spec, self.trial.number),
            "split_seed": spec.seed,
            "value": first_value(self.trial),
        }
        differ = [f"{key} {best.get(key)} for {value}" for key, value in wanted.items() if best.get(key) != value]
        if differ:
            raise SearchError(
                f"checkpoints/best.pt in the run of trial {self.trial.number} is of another training "
                f"({', '.join(differ)}): put back the file that the trial logged; {self.undone}"
            )
        return best

    def require_value(self, restored: Restored) -> None:
        """Make sure that the weights score on the validation data what they scored when they were trained.

        Raises:
            SearchError: they do not: the code has changed.
        """
        metric = self.study.spec.metric
        now, then = restored.validate()[metric], float(first_value(self.trial) or 0.0)
        if not math.isclose(now, then, rel_tol=_SAME, abs_tol=1e-6):
            raise SearchError(
                f"the weights of trial {self.trial.number} give val {metric} {now:.6g} now and gave {then:.6g} in "
                f"the search: put back the code that the study was run with; {self.undone}"
            )


def late_model(study: StoredStudy, trial: FrozenTrial, tracking: Tracking) -> str:
    """Make the model of a COMPLETE trial whose run has none, and return its id. Safe to repeat.

    Raises:
        SearchError: its weights are not to be had, or are not what the trial says they are; or its objective makes no
            model.
        ObjectiveError: today's code does not fit them.
        StorageError: MLflow refuses, or is away; or another process makes it.
    """
    missing = f"--trial {trial.number}: MLflow has no model of it"
    if removed := trial.user_attrs.get(REMOVED):
        raise SearchError(f"{missing} ({removed}); promote one that has")
    if (known := str(trial.user_attrs.get(TRACKING, ""))).startswith(PENDING):
        raise SearchError(f"{missing} yet ({known}): send it with {command('sync', study.spec.name)}")
    weights = BestWeights(study, trial, undone="nothing was promoted")
    with tempfile.TemporaryDirectory(prefix="hpsearch-") as name:
        folder, run_id = Path(name), str(trial.user_attrs[RUN_ID])
        path = weights.fetch(tracking, folder)
        best = weights.read(path)
        number, spec = trial.number, study.spec
        module = _exported(study, weights, best)
        tags = write_model(module, folder / "model", checkpoint=path, objective=spec.objective, number=number)
        with mlflow_request(f"take the model of trial {number}"):
            epoch = _epoch(tracking, run_id, f"val_{spec.metric}", best)
            record = model_record(spec, number, run_params(spec, trial.params), epoch, tags)
            return make_model(tracking, RunLinks(study.engine), trial._trial_id, run_id, record, folder / "model")


def _exported(study: StoredStudy, weights: BestWeights, best: dict[str, Any]) -> Callable[[], Exported]:
    """What makes the module to export, of weights that score what the trial scored."""
    objective = study.objective()
    if isinstance(objective, LoopObjective):  # nobody but its own loop knows what the value was measured on
        if not objective.defines("export"):
            raise SearchError(
                f"--trial {weights.trial.number}: MLflow has no model of it, and {objective.name} makes none: a "
                "function makes none, a LoopObjective by its export()"
            )
        return partial(exported, objective, best["model"], config_of(objective, best["config"]))
    restored = restore_best(model_objective(objective, "a model"), best)
    weights.require_value(restored)
    return restored.exported


def _epoch(tracking: Tracking, run_id: str, key: str, best: dict[str, Any]) -> EpochRecord:
    """The best epoch, at the time at which the run has it: another one's points would stand there twice."""
    history = tracking.client.get_metric_history(run_id, allowed_name(key))
    at = next((point.timestamp for point in history if point.step == best["epoch"]), int(time.time() * 1000))
    # MLflow counts milliseconds: of the middle of one, a rounding error makes no other.
    return EpochRecord(epoch=best["epoch"], metrics=dict(best["metrics"]), timestamp=(at + 0.5) / 1000)
