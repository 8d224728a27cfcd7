"""Training a configuration of an objective, by whichever loop it is made for, and what was kept of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.objective import BaseObjective, Objective
from hpsearch.objectives.own_loop.loop_objective import LoopObjective, RestoredLoop, config_of, restore_loop
from hpsearch.objectives.own_loop.run import LoopResult, LoopRun
from hpsearch.objectives.training.checks.held_out import Restored, restore_best
from hpsearch.objectives.training.config import RunPlan
from hpsearch.objectives.training.exportable import example_of
from hpsearch.objectives.training.loop.instruments import NONE, Instruments
from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
from hpsearch.objectives.training.result import FitResult, RunResult
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
    instruments: Instruments = NONE,
) -> RunResult:
    """Train a configuration to its end; for the parameters see `Trainer`.

    An own loop divides its data itself, whatever `plan.division`, and is watched by no `instruments`.

    Raises:
        ObjectiveError: the objective is wrong.
        NonFiniteError: the configuration diverges.
        DeviceMemoryError: it does not fit the device.
    """
    where: Any = {"session": session, "run_dir": run_dir, "device": device}
    if isinstance(objective, LoopObjective):
        if plan.refit is not None:
            model_objective(objective, "a refit")
        return LoopRun(objective, config, replace(plan, division=None), **where).fit()
    where |= {**asdict(plan), "instruments": instruments}
    return Trainer(model_objective(objective, "training"), config, **where).fit()


def restore(objective: BaseObjective, best: Mapping[str, Any]) -> Restored | RestoredLoop:
    """What a `best.pt` holds, ready to be tested.

    Raises:
        ObjectiveError: the objective does not give the data that the run was trained on, or a model that the weights
            fit; or it has no `test`.
    """
    if isinstance(objective, LoopObjective):
        return restore_loop(objective, best)
    return restore_best(model_objective(objective, "a test"), best)


def result_of(objective: BaseObjective, best: Mapping[str, Any], history: list[EpochRecord], path: Path) -> RunResult:
    """What a complete run came to, from what its last checkpoint has.

    Args:
        objective: of the run.
        best: what `promotable` gives of the checkpoint.
        history: of the run.
        path: of a file with `best`.

    Raises:
        ObjectiveError: today's code does not fit it.
    """
    curve = Curve(objective.metric, maximize=objective.direction == "maximize")
    curve.history, curve.best = history, dict(best)
    shared: dict[str, Any] = {"status": "completed", "curve": curve, "best_path": path, "last_path": None}
    if isinstance(objective, LoopObjective):
        config = config_of(objective, best["config"])
        return LoopResult(**shared, objective=objective, config=config, best=best["model"])
    restored = restore_best(model_objective(objective, "a model"), best)
    val = restored.splits.val
    return FitResult(
        **shared,
        model=restored.model,
        example=example_of(val),
        call=restored.call,
        split_hash=best["split_hash"],
        val=val,
    )


def model_objective(objective: BaseObjective, what: str) -> Objective:
    """The objective, where it has data and a model.

    Raises:
        ObjectiveError: it trains by a loop of its own, of which `what` can know nothing.
    """
    if isinstance(objective, Objective):
        return objective
    raise ObjectiveError(
        f"{objective.name} trains by a loop of its own, and {what} needs data() and model(); hpsearch train tries it"
    )
