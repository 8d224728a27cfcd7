"""Train a configuration of an objective with hpsearch's loop or a custom one, and restore the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpsearch.objectives.base_objective import BaseObjective
from hpsearch.objectives.custom_loop.loop_objective import LoopObjective, RestoredLoop, config_from_json, restore_loop
from hpsearch.objectives.custom_loop.run import LoopResult, LoopRun
from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.objective import Objective
from hpsearch.objectives.training.checks.restore_best import RestoredModel, restore_best
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.folds_trainer import FoldsTrainer
from hpsearch.objectives.training.loop.profiling import NO_INSTRUMENTS, Instruments
from hpsearch.objectives.training.loop.step_functions import bind_export
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
from hpsearch.objectives.training.result import FitResult, RunResult
from hpsearch.objectives.training.serving_module import build_example
from hpsearch.objectives.training.session import Curve, Session
from hpsearch.objectives.training.trainer import Trainer


def fit(
    objective: BaseObjective,
    config: Any,
    plan: RunPlan,
    *,
    session: Session | None = None,
    run_dir: Path | None = None,
    device: str | None = None,
    instruments: Instruments = NO_INSTRUMENTS,
) -> RunResult:
    """Train a configuration; see `Trainer` for the parameters.

    A custom loop splits its data itself, so it ignores `plan.resplit_seed`. It also ignores `instruments`.

    Raises:
        ObjectiveError: the code of the objective raised an error, or the configuration is invalid for it.
        NonFiniteError: the configuration diverges.
        DeviceMemoryError: the configuration does not fit in the device's memory.
    """
    options: Any = {"session": session, "run_dir": run_dir, "device": device}
    if plan.folds is not None:
        return FoldsTrainer(objective, config, plan, **options).fit()
    if isinstance(objective, LoopObjective):
        if plan.refit is not None:
            require_model_objective(objective, "a refit")
        return LoopRun(objective, config, replace(plan, resplit_seed=None), **options).fit()
    of_plan = {name: value for name, value in vars(plan).items() if name not in {"folds", "fold"}}
    options |= {**of_plan, "instruments": instruments}
    return Trainer(require_model_objective(objective, "training"), config, **options).fit()


def restore_model(objective: BaseObjective, best: Mapping[str, Any]) -> RestoredModel | RestoredLoop:
    """Restore the model of a run from the content of its `best.pt`.

    Raises:
        ObjectiveError: the objective's data has changed, the weights do not fit its model, or a custom loop has no
            `test`.
    """
    if isinstance(objective, LoopObjective):
        return restore_loop(objective, best)
    return restore_best(require_model_objective(objective, "a test"), best)


def rebuild_result(objective: BaseObjective, best: dict[str, Any], history: list[EpochRecord], path: Path) -> RunResult:
    """Rebuild the result of a complete run from its last checkpoint.

    Args:
        objective: objective of the run.
        best: content of the run's `best.pt`, as `promotable` returns it for the checkpoint.
        history: records of the run's epochs.
        path: path of a file that contains `best`.

    Raises:
        ObjectiveError: the objective's code has changed so that it does not fit the checkpoint.
    """
    curve = Curve(objective.metric, maximize=objective.direction == "maximize")
    curve.history, curve.best = history, dict(best)
    shared: dict[str, Any] = {"status": "completed", "curve": curve, "best_path": path, "last_path": None}
    if isinstance(objective, LoopObjective):
        config = config_from_json(objective, best["config"])
        return LoopResult(**shared, objective=objective, config=config, best=best["model"])
    restored = restore_best(require_model_objective(objective, "a model"), best)
    val = restored.splits.val
    return FitResult(
        **shared,
        model=restored.model,
        example=build_example(val),
        call=restored.call,
        export=bind_export(restored.objective, restored.config),
        split_hash=best["split_hash"],
        val=val,
    )


def require_model_objective(objective: BaseObjective, what: str) -> Objective:
    """Return the objective if it is an `Objective`; otherwise raise an error that names the feature `what`.

    Raises:
        ObjectiveError: the objective has a custom training loop.
    """
    if isinstance(objective, Objective):
        return objective
    raise ObjectiveError(f"{objective.name} has a custom loop, but {what} needs data() and model(); use hpsearch train")
