"""What the figures of a study's report show, as plain values: the page's own script draws them.

A plotting library would bring its script along into every page: plotly's is 4.8 MB, and its smaller bundle, which
PyPI does not have, 1 MB without parallel coordinates. Ours is 25 kB, and its colours are those of the reader's theme.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.curves.foreseen import Forecast
from hpsearch.search.finalists.table import Finalists
from hpsearch.search.finalists.text import SHOWN
from hpsearch.search.report.spent import Spent
from hpsearch.search.report.trials import state_of
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.study.front import broken_bounds
from hpsearch.search.study.ranking import first_value, in_bounds
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import REASON

_AXES = 9  # of the parallel coordinates, the value's among them: more cannot be told apart
_FORESEEN = 12  # trials whose ends are drawn beside the learning curves
_POINTS = 40_000  # of all learning curves together, beyond which they are thinned out


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
    stride = math.ceil(sum(len(t.intermediate_values) for t in shown) / _POINTS) or 1
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
        "foreseen": _foreseen(forecasts),
        "axes": _axes(shown, names, [] if isinstance(shares, str) else [name for name, _ in shares]),
        "finalists": None if finalists is None else _finalists(finalists),
    }


def named(spec: StudySpec) -> str:
    """Return the metric as figures and tables name it; of several, the first."""
    return spec.metric if spec.several else f"val {spec.metric}"


def importances(study: StoredStudy, place: int = 0) -> list[tuple[str, float]] | str:
    """Return each parameter's share in how far apart the values are, the largest first, or why there is none yet.

    Args:
        study: the study.
        place: of the metric among several.
    """
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


def _foreseen(forecasts: Mapping[int, Forecast]) -> list[dict[str, Any]]:
    """Return the best that are foreseen; all at once could not be told apart."""
    return [
        {"trial": number, "value": finite(each.value), "low": finite(each.low), "high": finite(each.high)}
        for number, each in list(forecasts.items())[:_FORESEEN]
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
            "mean": None if row.mean is None else finite(row.mean),
            "values": [None if value is None else finite(value) for value in row.values],
            "verdict": "" if found.pending else SHOWN[found.verdict(row)],
        }
        for row in found.rows
    ]
