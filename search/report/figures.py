"""The data of the report's figures: learning curves, importances, Pareto front, hypervolume."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.console import pluralize
from hpsearch.search.finalists.table import Finalists
from hpsearch.search.finalists.text import format_verdict_word
from hpsearch.search.freeze_thaw.forecast_text import Forecast
from hpsearch.search.report.importances import Importances
from hpsearch.search.report.trials import EpochUsage, find_eligible_trials, format_state
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.study.ranking import get_first_value, is_feasible
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.summary import Summary, format_value, list_violations
from hpsearch.storage.attributes import REASON
from hpsearch.storage.rungs.fronts import compute_hypervolume, to_losses
from hpsearch.storage.trials.history import read_epoch_values

_MAX_AXES = 9  # maximum in the parallel coordinates plot, including the axis of the value
_MAX_FORECASTS = 12  # drawn together with the learning curves
_MAX_CURVE_POINTS = 40_000  # maximum of all learning curves together; if there are more, epochs are omitted


def make_figure_data(
    study: StoredStudy,
    shown: list[FrozenTrial],
    names: list[str],
    *,
    importances: Importances | str,
    finalists: Finalists | None,
    usage: EpochUsage,
    forecasts: Mapping[int, Forecast],
) -> dict[str, Any]:
    """Return the JSON data of all figures. Non-finite numbers are None."""
    stride = math.ceil(sum(len(t.intermediate_values) for t in shown) / _MAX_CURVE_POINTS) or 1
    return {
        "metric": format_metric_label(study.spec),
        "maximize": study.spec.direction == "maximize",
        "epochs": study.spec.epochs,
        "names": names,
        "trials": [
            {
                "number": trial.number,
                "state": format_state(trial),
                "value": round_for_json(get_first_value(trial)),
                "values": [round_for_json(value) for value in trial.values or ()],
                "broken": list_violations(study.spec, trial),
                "reason": reason,
                "params": [to_json_value(trial.params[name]) if name in trial.params else None for name in names],
                "curve": _thin_curve(trial, stride),
                "pauses": usage.pause_epochs.get(trial.number, []),
            }
            for trial, reason in ((t, _short_reason(t)) for t in sorted(shown, key=lambda t: t.number))
        ],
        "chosen": _find_best_number(study),
        "best": _find_improvements(study),
        "epoch_usage": usage.figure,
        "forecasts": [
            {
                "trial": number,
                "value": round_for_json(each.value),
                "low": round_for_json(each.low),
                "high": round_for_json(each.high),
            }
            for number, each in list(forecasts.items())[:_MAX_FORECASTS]
        ],
        "axes": _make_axes(
            shown, names, [] if isinstance(importances, str) else [name for name, _ in importances.shares]
        ),
        "finalists": None if finalists is None else _make_finalist_rows(finalists),
    }


def format_metric_label(spec: StudySpec) -> str:
    """Return the label of the metric in figures and tables; in a multi-objective study, of the first metric."""
    return spec.metric if spec.is_multi_objective else f"val {spec.metric}"


def round_for_json(value: float | None) -> float | None:
    """Return a number rounded to six significant digits; None if the number is None or not finite."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def to_json_value(value: Any) -> Any:
    """Return a parameter's value for JSON. Booleans, categories and non-finite numbers become texts."""
    if isinstance(value, float) and math.isfinite(value):
        return round_for_json(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _short_reason(trial: FrozenTrial) -> str:
    reason = str(trial.user_attrs.get(REASON, ""))
    return "" if trial.state == TrialState.COMPLETE else reason.split("\n", 1)[0][:200]


def _thin_curve(trial: FrozenTrial, stride: int) -> list[tuple[int, float | None]]:
    steps = sorted(trial.intermediate_values.items())
    kept = [step for index, step in enumerate(steps) if index % stride == 0 or index == len(steps) - 1]
    return [(step + 1, round_for_json(value)) for step, value in kept]


def _find_best_number(study: StoredStudy) -> int | None:
    """Return the number of the best trial with a finite value of the first metric; None if there is none."""
    ranked = study.front() if study.spec.is_multi_objective else study.best_trials()
    return next((trial.number for trial in ranked if round_for_json(get_first_value(trial)) is not None), None)


def _find_improvements(study: StoredStudy) -> list[tuple[int, float]]:
    """Return number and value of each feasible trial that was better than all earlier feasible trials."""
    sign = 1 if study.spec.direction == "maximize" else -1
    found: list[tuple[int, float]] = []
    for trial in study.trials(TrialState.COMPLETE):
        value = round_for_json(get_first_value(trial)) if is_feasible(trial) else None
        if value is not None and (not found or sign * value > sign * found[-1][1]):
            found.append((trial.number, value))
    return found


def _make_axes(shown: list[FrozenTrial], names: list[str], important: list[str]) -> list[dict[str, Any]]:
    """Return the axes of the parallel coordinates plot.

    The axes are the most important parameters that differ between trials and that all complete trials have. A trial
    that lacks a (conditional) parameter has no point on the axis of this parameter.
    """
    complete = [t for t in shown if t.state == TrialState.COMPLETE and round_for_json(get_first_value(t)) is not None]
    axes = []
    for index, name in enumerate(names):
        values = [t.params[name] for t in complete if name in t.params]
        if len(values) == len(complete) and len(set(map(str, values))) > 1:
            axes.append(_make_axis(index, name, complete[-1].distributions[name], values))
    by_importance = {name: rank for rank, name in enumerate(important)}
    taken = sorted(axes, key=lambda axis: by_importance.get(axis["name"], len(names)))[: _MAX_AXES - 1]
    return [axis for axis in axes if axis in taken]


def _make_axis(index: int, name: str, distribution: object, values: list[Any]) -> dict[str, Any]:
    axis: dict[str, Any] = {"index": index, "name": name, "log": False, "choices": None}
    if isinstance(distribution, CategoricalDistribution):
        return {**axis, "choices": [to_json_value(choice) for choice in distribution.choices if choice in values]}
    log = isinstance(distribution, FloatDistribution | IntDistribution) and distribution.log
    return {**axis, "log": log and min(values) > 0}


def _make_finalist_rows(found: Finalists) -> list[dict[str, Any]]:
    return [
        {
            "trial": row.trial,
            "search": round_for_json(row.search_value),
            "mean": round_for_json(row.mean),
            "values": [round_for_json(value) for value in row.values],
            "verdict": "" if found.pending else format_verdict_word(found.verdict(row)),
        }
        for row in found.rows
    ]


_MAX_VOLUME_POINTS = 1000  # of the figure; if there are more epochs, the hypervolume is computed at every n-th epoch


@dataclass(frozen=True)
class HypervolumeHistory:
    """The hypervolume of the Pareto front over the epochs of a study, as a share of the final hypervolume.

    Attributes:
        epochs: total number of epochs of all trials.
        points: each change of the hypervolume, as (epochs of the study so far, share, trial, epoch of the trial from
            1).
        reference: reference point, which is the worst value of each metric among complete trials.
    """

    epochs: int
    points: list[tuple[int, float, int, int]]
    reference: list[float]

    @property
    def figure(self) -> dict[str, Any]:
        """The JSON data of the hypervolume figure."""
        return {"epochs": self.epochs, "points": [(at, float(f"{share:.4g}"), *of) for at, share, *of in self.points]}


def compute_hypervolume_history(study: StoredStudy, order: Sequence[tuple[int, int]]) -> HypervolumeHistory | None:
    """Return the hypervolume over the epochs of a study; None if the final hypervolume is zero.

    A trial counts with the values of its best epoch so far by the first metric, because its model has the weights of
    this epoch. A new best epoch may have a worse second metric, so the hypervolume can decrease.

    Args:
        study: a multi-objective study.
        order: (trial, epoch from 0) of all epochs, in the order in which the epochs ended.
    """
    maximize, trials = study.spec.maximize_each, study.trials()
    complete = [t.values for t in trials if t.state == TrialState.COMPLETE and t.values]
    ended = [values for values in complete if all(map(math.isfinite, values))]
    if not ended:
        return None
    worst = to_losses(ended, maximize).max(axis=0)
    reported, usable = read_epoch_values(study.engine, study.study_id), find_eligible_trials(study)
    held = np.full((len(trials), len(maximize)), np.inf)
    stride = math.ceil(len(order) / _MAX_VOLUME_POINTS) or 1
    found: list[tuple[int, float, int, int]] = []
    changed: tuple[int, int] | None = None
    for count, (number, step) in enumerate(order, start=1):
        values = reported.get(trials[number]._trial_id, {}).get(step)
        if number in usable and values is not None:
            [losses] = to_losses([values], maximize)
            if losses[0] < held[number, 0]:
                held[number], changed = losses, (number, step + 1)
        if changed is not None and (count % stride == 0 or count == len(order)):
            now = compute_hypervolume(held, worst.tolist())
            if now != (found[-1][1] if found else 0.0):
                found.append((count, now, *changed))
            changed = None
    if not found or not found[-1][1]:
        return None
    signs = np.where(maximize, -1.0, 1.0)
    points = [(count, now / found[-1][1], number, epoch) for count, now, number, epoch in found]
    return HypervolumeHistory(len(order), points, (worst * signs).tolist())


_MAX_FRONT_ROWS = 200


def make_front_figure(study: StoredStudy, summary: Summary) -> dict[str, Any]:
    """Return the JSON data of the Pareto front figure."""
    spec, names = study.spec, list(study.spec.direction_by_metric)
    return {
        "metrics": [{"name": name, "maximize": way == "maximize"} for name, way in spec.direction_by_metric.items()],
        "trials": [trial.number for trial in summary.front],
        "bounds": [
            {"metric": names.index(bound.metric), "limit": bound.limit, "text": str(bound)}
            for bound in spec.constraint_bounds
            if bound.metric in names
        ],
    }


def make_front_section(
    study: StoredStudy, summary: Summary, rows: list[dict[str, Any]], found: HypervolumeHistory | None
) -> dict[str, Any]:
    """Return the template values for the report's section on the Pareto front.

    Args:
        study: a multi-objective study.
        summary: summary of the study.
        rows: rows of the table of trials.
        found: hypervolume over the epochs; None if the hypervolume is zero.
    """
    spec, numbers = study.spec, {trial.number for trial in summary.front}
    worst = zip(spec.direction_by_metric, found.reference, strict=True) if found else ()
    return {
        "metrics": list(spec.direction_by_metric),
        "numbers": numbers,
        "rows": [row for row in rows if row["number"] in numbers][:_MAX_FRONT_ROWS],
        "left": max(len(summary.front) - _MAX_FRONT_ROWS, 0),
        "undrawn": " and ".join(
            str(bound) for bound in spec.constraint_bounds if bound.metric not in spec.direction_by_metric
        ),
        "reference": ", ".join(f"{name} {format_value(value)}" for name, value in worst),
    }


def format_front_headline(study: StoredStudy, summary: Summary) -> str:
    """Return one sentence with the result of a multi-objective study that has a Pareto front."""
    metrics = list(study.spec.direction_by_metric)
    names = f"{', '.join(metrics[:-1])} and {metrics[-1]}"
    trials, many = pluralize(summary.finished, "trial"), len(summary.front)
    if many == 1:
        return f"The Pareto front in {names} has one of {trials}: trial {summary.front[0].number}."
    return f"The Pareto front in {names} has {many} of {trials}; no other trial dominates them."


def make_front_cards(study: StoredStudy, summary: Summary) -> list[tuple[str, str]]:
    """Return the report's cards with the size of the Pareto front and the best value of each metric on the front."""
    if not summary.front:
        return []
    found = [(str(len(summary.front)), f"on the Pareto front, of {pluralize(summary.complete, 'complete trial')}")]
    for place, (name, way) in enumerate(study.spec.direction_by_metric.items()):
        sign = -1 if way == "maximize" else 1
        best = min(summary.front, key=lambda trial: (sign * trial.values[place], trial.number))
        found.append((format_value(best.values[place]), f"best {name} on the Pareto front, trial {best.number}"))
    return found
