"""The figures of the report: learning curves, Pareto front, hypervolume."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.console import counted
from hpsearch.search.curves.forecast import Forecast
from hpsearch.search.finalists.table import Finalists
from hpsearch.search.finalists.text import shown
from hpsearch.search.report.trials import Spent, in_hand, state_of
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.study.ranking import first_value, in_bounds
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.summary import Summary, broken_bounds, format_value
from hpsearch.storage.attributes import REASON
from hpsearch.storage.rungs.fronts import hypervolume, losses_of
from hpsearch.storage.trials.history import read_epoch_values

_AXES = 9  # of the parallel coordinates, the value's among them: more cannot be told apart
_FORESEEN = 12  # trials whose ends are drawn beside the learning curves
_MAX_CURVE_POINTS = 40_000  # of all learning curves together, beyond which they are thinned out


def figure_data(
    study: StoredStudy,
    shown: list[FrozenTrial],
    names: list[str],
    *,
    shares: list[tuple[str, float]] | str,
    finalists: Finalists | None,
    spent: Spent,
    forecasts: Mapping[int, Forecast],
) -> dict[str, Any]:
    """Return what the page's script draws, fit for JSON: what is no finite number is None."""
    stride = math.ceil(sum(len(t.intermediate_values) for t in shown) / _MAX_CURVE_POINTS) or 1
    return {
        "metric": named(study.spec),
        "maximize": study.spec.direction == "maximize",
        "epochs": study.spec.epochs,
        "names": names,
        "trials": [
            {
                "number": trial.number,
                "state": state_of(trial),
                "value": finite(first_value(trial)),
                "values": [finite(value) for value in trial.values or ()],
                "broken": broken_bounds(study.spec, trial),
                "reason": reason,
                "params": [plain(trial.params[name]) if name in trial.params else None for name in names],
                "curve": _curve(trial, stride),
                "pauses": spent.pauses.get(trial.number, []),
            }
            for trial, reason in ((t, _why(t)) for t in sorted(shown, key=lambda t: t.number))
        ],
        "chosen": _chosen(study),
        "best": _improvements(study),
        "spent": spent.figure,
        "foreseen": [
            {"trial": number, "value": finite(each.value), "low": finite(each.low), "high": finite(each.high)}
            for number, each in list(forecasts.items())[:_FORESEEN]
        ],
        "axes": _axes(shown, names, [] if isinstance(shares, str) else [name for name, _ in shares]),
        "finalists": None if finalists is None else _finalists(finalists),
    }


def named(spec: StudySpec) -> str:
    """Return the metric as figures and tables name it; of several, the first."""
    return spec.metric if spec.several else f"val {spec.metric}"


def importances(study: StoredStudy, place: int = 0) -> list[tuple[str, float]] | str:
    """Return each parameter's share in how far apart the values are, the largest first, or why there is none yet."""
    values = [t.values[place] for t in study.trials(TrialState.COMPLETE) if t.values]
    if len(values) < 2:
        return "Shown from two complete trials on."
    if len(set(values)) == 1:  # of which Optuna's evaluator gives each parameter the same share
        return f"All {len(values)} complete trials have the same value: which parameter matters cannot be told."
    if len({name for t in study.trials() for name in t.params}) == 1:
        return "There is one parameter, and nothing to compare it with."
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # which evaluators are experimental is not the reader's concern
            # Optuna takes a target to be better where it is lower.
            sign = -1.0 if study.spec.maximized[place] else 1.0
            target = (lambda t: sign * t.values[place]) if study.spec.several else None
            return list(optuna.importance.get_param_importances(study.open(), target=target).items())
    except (ValueError, RuntimeError) as error:  # too few trials, or no spread in their values
        return f"Not to be told yet: {error}"


def finite(value: float | None) -> float | None:
    """Return a number with six digits that count, if it is one."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def plain(value: Any) -> Any:
    """Return a parameter's value as JSON has it; what is no finite number by its name."""
    if isinstance(value, float) and math.isfinite(value):
        return finite(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _why(trial: FrozenTrial) -> str:
    reason = str(trial.user_attrs.get(REASON, ""))
    return "" if trial.state == TrialState.COMPLETE else reason.split("\n", 1)[0][:200]


def _curve(trial: FrozenTrial, stride: int) -> list[tuple[int, float | None]]:
    steps = sorted(trial.intermediate_values.items())
    return [
        (step + 1, finite(value))
        for index, (step, value) in enumerate(steps)
        if index % stride == 0 or index == len(steps) - 1
    ]


def _chosen(study: StoredStudy) -> int | None:
    """Return the number of the best trial that can be drawn; of several metrics by the first."""
    ranked = study.front() if study.spec.several else study.best_trials()
    return next((trial.number for trial in ranked if finite(first_value(trial)) is not None), None)


def _improvements(study: StoredStudy) -> list[tuple[int, float]]:
    """Return the trials that were the best when they came, by number, of all that are within bounds."""
    sign = 1 if study.spec.direction == "maximize" else -1
    found: list[tuple[int, float]] = []
    for trial in study.trials():
        value = finite(first_value(trial)) if trial.state == TrialState.COMPLETE and in_bounds(trial) else None
        if value is not None and (not found or sign * value > sign * found[-1][1]):
            found.append((trial.number, value))
    return found


def _axes(shown: list[FrozenTrial], names: list[str], important: list[str]) -> list[dict[str, Any]]:
    """Return the axes of the parallel coordinates: of parameters that all complete trials have, and that differ.

    A conditional parameter would leave out the trials that lack it. Of many the most important are taken.
    """
    complete = [t for t in shown if t.state == TrialState.COMPLETE and finite(first_value(t)) is not None]
    axes = []
    for index, name in enumerate(names):
        values = [t.params[name] for t in complete if name in t.params]
        if len(values) == len(complete) and len(set(map(str, values))) > 1:
            axes.append(_axis(index, name, complete[-1].distributions[name], values))
    by_importance = {name: rank for rank, name in enumerate(important)}
    taken = sorted(axes, key=lambda axis: by_importance.get(axis["name"], len(names)))[: _AXES - 1]
    return [axis for axis in axes if axis in taken]


def _axis(index: int, name: str, distribution: object, values: list[Any]) -> dict[str, Any]:
    axis: dict[str, Any] = {"index": index, "name": name, "log": False, "choices": None}
    if isinstance(distribution, CategoricalDistribution):
        return {**axis, "choices": [plain(choice) for choice in distribution.choices if choice in values]}
    log = isinstance(distribution, FloatDistribution | IntDistribution) and distribution.log
    return {**axis, "log": log and min(values) > 0}


def _finalists(found: Finalists) -> list[dict[str, Any]]:
    return [
        {
            "trial": row.trial,
            "search": finite(row.search_value),
            "mean": finite(row.mean),
            "values": [finite(value) for value in row.values],
            "verdict": "" if found.pending else shown(found.verdict(row)),
        }
        for row in found.rows
    ]


_MAX_VOLUME_POINTS = 1000  # of the figure: of more epochs every second is looked at, or third


@dataclass(frozen=True)
class Volume:
    """What share of the final hypervolume a study had after so many epochs.

    Attributes:
        epochs: that were trained in the whole study.
        points: after how many of them, the share, and whose epoch (from 1) made it so: where it changed.
        reference: the worst of each metric among complete trials, up to which volume is counted.
    """

    epochs: int
    points: list[tuple[int, float, int, int]]
    reference: list[float]

    @property
    def figure(self) -> dict[str, Any]:
        """What the page's script draws, fit for JSON."""
        return {"epochs": self.epochs, "points": [(at, float(f"{share:.4g}"), *of) for at, share, *of in self.points]}


def volume(study: StoredStudy, order: Sequence[tuple[int, int]]) -> Volume | None:
    """Return the hypervolume over the epochs of a study; None while no volume is dominated.

    A trial is in hand with the values of its best epoch so far by the first metric, as its model is kept and as it
    ends. Where that epoch moves another metric may be worse than it was, and the volume may shrink.

    Args:
        study: of several metrics.
        order: trial and epoch (from 0) of all that were trained, in the order in which they ended.
    """
    maximize, trials = study.spec.maximized, study.trials()
    complete = [t.values for t in trials if t.state == TrialState.COMPLETE and t.values]
    ended = [values for values in complete if all(map(math.isfinite, values))]
    if not ended:
        return None
    worst = losses_of(ended, maximize).max(axis=0)
    reported, usable = read_epoch_values(study.engine, study.study_id), in_hand(study)
    held = np.full((len(trials), len(maximize)), np.inf)
    stride = math.ceil(len(order) / _MAX_VOLUME_POINTS) or 1
    found: list[tuple[int, float, int, int]] = []
    changed: tuple[int, int] | None = None
    for count, (number, step) in enumerate(order, start=1):
        values = reported.get(trials[number]._trial_id, {}).get(step)
        if number in usable and values is not None:
            [losses] = losses_of([values], maximize)
            if losses[0] < held[number, 0]:
                held[number], changed = losses, (number, step + 1)
        if changed is not None and (count % stride == 0 or count == len(order)):
            now = hypervolume(held, worst.tolist())
            if now != (found[-1][1] if found else 0.0):
                found.append((count, now, *changed))
            changed = None
    if not found or not found[-1][1]:
        return None
    signs = np.where(maximize, -1.0, 1.0)
    points = [(count, now / found[-1][1], number, epoch) for count, now, number, epoch in found]
    return Volume(len(order), points, (worst * signs).tolist())


_ROWS = 200  # of the table


def front_figure(study: StoredStudy, summary: Summary) -> dict[str, Any]:
    """Return what the page's script draws beside the trials, fit for JSON."""
    names = list(study.spec.ways)
    return {
        "metrics": [{"name": name, "maximize": way == "maximize"} for name, way in study.spec.ways.items()],
        "trials": [trial.number for trial in summary.front],
        "bounds": [
            {"metric": names.index(bound.metric), "limit": bound.limit, "text": str(bound)}
            for bound in study.spec.bounds
            if bound.metric in names
        ],
    }


def front_section(
    study: StoredStudy, summary: Summary, rows: list[dict[str, Any]], found: Volume | None
) -> dict[str, Any]:
    """Return the values of the front's section.

    Args:
        study: of several metrics.
        summary: of the study.
        rows: of the table of trials.
        found: the hypervolume over epochs; None without one.
    """
    spec, numbers = study.spec, {trial.number for trial in summary.front}
    worst = zip(spec.ways, found.reference, strict=True) if found else ()
    return {
        "metrics": list(spec.ways),
        "numbers": numbers,
        "rows": [row for row in rows if row["number"] in numbers][:_ROWS],
        "left": max(len(summary.front) - _ROWS, 0),
        "undrawn": " and ".join(str(bound) for bound in spec.bounds if bound.metric not in spec.ways),
        "reference": ", ".join(f"{name} {format_value(value)}" for name, value in worst),
    }


def headline(study: StoredStudy, summary: Summary) -> str:
    """Return what came of a study of several metrics, in a sentence; of one that has a front."""
    metrics = list(study.spec.ways)
    named = f"{', '.join(metrics[:-1])} and {metrics[-1]}"
    trials, many = counted(summary.finished, "trial"), len(summary.front)
    if many == 1:
        return f"The front in {named} is trial {summary.front[0].number} alone, out of {trials}."
    return f"The front in {named} has {many} of {trials}: none of them is dominated by another trial."


def cards(study: StoredStudy, summary: Summary) -> list[tuple[str, str]]:
    """Return the numbers at the head of the page: how many are on the front, and the best of each metric."""
    if not summary.front:
        return []
    found = [(str(len(summary.front)), f"on the front, of {counted(summary.complete, 'complete trial')}")]
    for place, (name, way) in enumerate(study.spec.ways.items()):
        sign = -1 if way == "maximize" else 1
        best = min(summary.front, key=lambda trial: (sign * trial.values[place], trial.number))
        found.append((format_value(best.values[place]), f"best {name} on the front, trial {best.number}"))
    return found
