"""The trials of a study's report: which are shown, in what order, and what a row of the table says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.curves.foreseen import Forecast
from hpsearch.search.report.trial import why_waiting
from hpsearch.search.study.front import broken_bounds
from hpsearch.search.study.ranking import first_value, in_bounds
from hpsearch.search.study.rungs import seconds_run
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.summary import format_seconds, format_value
from hpsearch.storage.attributes import INFEASIBLE, REASON, RUN_URL

SHOWN = 500  # trials at most: a page of thousands opens slowly, and nobody reads them

_STATES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
}


def state_of(trial: FrozenTrial) -> str:
    """Return a trial's state in the words of the page."""
    return "infeasible" if trial.user_attrs.get(INFEASIBLE) else _STATES[trial.state]


def shown_trials(study: StoredStudy) -> list[FrozenTrial]:
    """Return the trials that the page shows, complete ones first and the best of them first, then the latest.

    Of several metrics the front is first. What is out of bounds comes after all that is within.
    """
    sign = -1 if study.spec.direction == "maximize" else 1
    ended = study.best_trials() if study.spec.several else []
    ranked = dict.fromkeys([trial.number for trial in [*study.front(), *ended]] if study.spec.several else [])
    places = {number: place for place, number in enumerate(ranked)}

    def place(trial: FrozenTrial) -> tuple[int, float, int]:
        value = first_value(trial)
        if trial.state != TrialState.COMPLETE or value is None or not math.isfinite(value):
            return 2, 0.0, -trial.number
        return int(not in_bounds(trial)), places.get(trial.number, sign * value), trial.number

    return sorted(study.trials(), key=place)[:SHOWN]


def parameter_names(trials: list[FrozenTrial]) -> list[str]:
    """Return the names of all parameters, those that the first trial has first."""
    return list(dict.fromkeys(name for t in sorted(trials, key=lambda t: t.number) for name in t.params))


def trial_rows(
    study: StoredStudy, trials: list[FrozenTrial], names: list[str], forecasts: Mapping[int, Forecast]
) -> list[dict[str, Any]]:
    """Return the rows of the table: what is shown, and beside it what it is sorted by.

    Args:
        study: the study.
        trials: of it.
        names: of the parameters that have a column.
        forecasts: of trials that run or wait.
    """
    seconds, waiting = seconds_run(study, trials), why_waiting(study)

    def reason(trial: FrozenTrial) -> str:
        found = forecasts.get(trial.number)
        told = [
            waiting.get(trial.number) or str(trial.user_attrs.get(REASON, "")),
            f"foreseen {found}" if found else "",
        ]
        return "; ".join(filter(None, told))

    return [_row(study, trial, names, seconds.get(trial._trial_id), reason(trial)) for trial in trials]


def _row(
    study: StoredStudy, trial: FrozenTrial, names: list[str], seconds: float | None, reason: str
) -> dict[str, Any]:
    values: list[float | None] = [*trial.values] if trial.values else [None] * len(study.spec.ways)
    return {
        "number": trial.number,
        "state": state_of(trial),
        "broken": broken_bounds(study.spec, trial),
        "values": [_told(study, value) for value in values],
        "epochs": f"{len(trial.intermediate_values)}/{study.spec.epochs}",
        "duration": "" if seconds is None else format_seconds(seconds),
        "params": [format_value(trial.params[name]) if name in trial.params else "" for name in names],
        "listed": ", ".join(f"{k} = {format_value(v)}" for k, v in trial.params.items()),
        "reason": reason,
        "url": trial.user_attrs.get(RUN_URL),
        "by": {
            "values": values,
            "epochs": len(trial.intermediate_values),
            "duration": seconds,
            "params": [trial.params.get(name, "") for name in names],
        },
    }


def _told(study: StoredStudy, value: float | None) -> str:
    if value is None:
        return ""
    return format_value(value) if study.spec.several else f"{value:.4f}"  # metrics of any size
