"""The registrable model of a trial that left none, made from its best checkpoint when somebody asks for it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial

from hpsearch.objectives.fit import model_objective
from hpsearch.objectives.own_loop.loop_objective import LoopObjective
from hpsearch.objectives.own_loop.restored import config_of
from hpsearch.objectives.own_loop.run import exported
from hpsearch.objectives.training.checks.held_out import restore_best
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
from hpsearch.objectives.training.result import Exported
from hpsearch.search.console import command
from hpsearch.search.errors import SearchError
from hpsearch.search.promotion.best_weights import BestWeights, judged_objective
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.tracking.trial_model import model_record, run_params, write_model
from hpsearch.storage.attributes import PENDING, REMOVED, RUN_ID, TRACKING
from hpsearch.storage.errors import StorageError
from hpsearch.storage.mlflow.client import Tracking, allowed_name
from hpsearch.storage.mlflow.health import one_line
from hpsearch.storage.mlflow.model_of_run import make_model
from hpsearch.storage.mlflow.run_links import RunLinks

_UNDONE = "nothing was promoted"


def late_model(study: StoredStudy, trial: FrozenTrial, tracking: Tracking) -> str:
    """Make the model of a COMPLETE trial whose run has none, and return its id. Safe to repeat.

    Raises:
        SearchError: its weights are not to be had, or are not what the trial says they are; or its objective makes no
            model.
        ObjectiveError: today's code does not fit them.
        StorageError: MLflow refuses, or is away; or another process makes it.
    """
    _require_kept(study, trial)
    weights = BestWeights(study, trial, undone=_UNDONE)
    with tempfile.TemporaryDirectory(prefix="hpsearch-") as name:
        folder, run_id = Path(name), str(trial.user_attrs[RUN_ID])
        path = weights.fetch(tracking, folder)
        best = weights.read(path)
        number, spec = trial.number, study.spec
        module = _exported(study, weights, best)
        tags = write_model(module, folder / "model", checkpoint=path, objective=spec.objective, number=number)
        try:
            epoch = _epoch(tracking, run_id, f"val_{spec.metric}", best)
            record = model_record(spec, number, run_params(spec, trial.params), epoch, tags)
            return make_model(tracking, RunLinks(study.engine), trial._trial_id, run_id, record, folder / "model")
        except StorageError:
            raise
        except Exception as error:  # MLflow's client raises what its transport does
            raise StorageError(f"MLflow did not take the model of trial {number}: {one_line(error)}") from None


def _require_kept(study: StoredStudy, trial: FrozenTrial) -> None:
    """Refuse a trial whose weights are gone, or are on their way with a model."""
    missing = f"--trial {trial.number}: MLflow has no model of it"
    if removed := trial.user_attrs.get(REMOVED):
        raise SearchError(f"{missing} ({removed}); promote one that has")
    if (known := str(trial.user_attrs.get(TRACKING, ""))).startswith(PENDING):
        raise SearchError(f"{missing} yet ({known}): send it with {command('sync', study.spec.name)}")


def _exported(study: StoredStudy, weights: BestWeights, best: dict[str, Any]) -> Callable[[], Exported]:
    """What makes the module to export, of weights that score what the trial scored."""
    objective = judged_objective(study)
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
